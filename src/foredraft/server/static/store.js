// What this browser keeps: conversations and settings. Nothing of it leaves the browser but what is sent as a prompt.

const ENTRY = "foredraft.conversation."; // and the id
const LIST = "foredraft.conversations";
const SETTINGS = "foredraft.settings";
const CURRENT = "foredraft.current";

export const DEFAULTS = {
  system: "",
  spec: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  repetition_penalty: "",
  seed: "",
  max_tokens: "1024",
  acceptance: "match",
  grammar_kind: "none",
  grammar: "",
  tints: false,
  theme: "system",
};

export function loadSettings() {
  return { ...DEFAULTS, ...read(SETTINGS, {}) };
}

export function saveSettings(settings) {
  write(SETTINGS, settings);
}

// Each conversation has an entry of its own, so no tab writes over what another one saved. The newest change of a
// conversation wins, and one that another tab has deleted stays deleted.
export class Conversations {
  #stored = new Set(); // the ids of those that have an entry, as far as this tab knows

  constructor() {
    this.all = [];
    this.follow(null);
    this.#takeList();
    const id = read(CURRENT, "", "sessionStorage") || read(CURRENT, "");
    this.open(this.all.find((each) => each.id === id) ?? this.all[0] ?? this.#add());
  }

  create() {
    if (this.current.messages.length) this.open(this.#add());
  }

  open(conversation) {
    this.current = conversation;
    write(CURRENT, conversation.id, "sessionStorage"); // a tab that is loaded again stays where it was
    write(CURRENT, conversation.id); // a new one begins where the last one was
  }

  // Returns how to have it back.
  remove(conversation) {
    this.#drop(conversation);
    erase(ENTRY + conversation.id);
    return () => {
      this.#dropEmpty();
      this.#insert(conversation);
      this.open(conversation);
      this.save(conversation);
    };
  }

  // Conversations of a file, under ids of their own; the first one is opened.
  take(conversations) {
    this.#dropEmpty();
    for (const each of conversations.toReversed()) {
      this.open(this.#add(each));
      this.save(this.current);
    }
  }

  // One without messages is not kept. Where the browser's space is used up, the steps of all answers go first: they are
  // many times larger than the texts.
  save(conversation) {
    const { id, messages } = conversation;
    if (!this.all.includes(conversation) || (this.#stored.has(id) && !isKept(ENTRY + id))) return; // it was deleted
    if (!messages.length) {
      this.#stored.delete(id);
      erase(ENTRY + id);
      return;
    }
    if (!write(ENTRY + id, conversation)) for (const each of this.all) if (each.messages.length) write(ENTRY + each.id, withoutSteps(each));
    if (isKept(ENTRY + id)) this.#stored.add(id);
  }

  // Takes over what another tab did to the entry of this key, or to any if it is null. The conversation that is `held`
  // is at work here and only goes if it was deleted. Returns whether there is anything to show.
  follow(key, held = null) {
    if (key === null) return [...keysOf(ENTRY), ...[...this.#stored].map((id) => ENTRY + id)].map((each) => this.follow(each, held)).some(Boolean);
    if (!key.startsWith(ENTRY)) return false;
    const id = key.slice(ENTRY.length);
    const known = this.all.find((each) => each.id === id);
    const kept = read(key, null);
    if (!Array.isArray(kept?.messages)) {
      if (!this.#stored.has(id)) return false;
      this.#drop(known);
      return true;
    }
    this.#stored.add(id);
    if (known && known === held) return false;
    for (const message of kept.messages) if (message.role === "assistant") message.finish ??= "interrupted";
    if (!known) this.#insert(kept);
    const isShown = !known || known === this.current || titleOf(known) !== titleOf(kept);
    if (known) Object.assign(known, kept);
    return isShown;
  }

  // A list of all conversations, as versions before 0.3.0 kept it, becomes entries.
  #takeList() {
    const given = read(LIST, []);
    erase(LIST);
    for (const each of given.toReversed()) this.save(this.#add(each));
  }

  #drop(conversation) {
    this.#stored.delete(conversation.id);
    this.all = this.all.filter((each) => each !== conversation);
    if (this.current === conversation) this.open(this.all[0] ?? this.#add());
  }

  #add(given = { created: new Date().toISOString(), messages: [] }) {
    const added = Math.max(Date.now(), 1 + (this.all[0]?.added ?? 0));
    const conversation = { ...given, added, id: crypto.getRandomValues(new Uint32Array(2)).join("-") };
    this.#insert(conversation);
    return conversation;
  }

  #dropEmpty() {
    this.all = this.all.filter((each) => each.messages.length);
  }

  // The last that was added is the first.
  #insert(conversation) {
    this.all = [...this.all, conversation].sort((a, b) => b.added - a.added);
  }

  exported(which) {
    const conversations = which.map((each) => ({ ...each, title: titleOf(each) }));
    return JSON.stringify({ format: "foredraft-conversations", version: 1, exported: new Date().toISOString(), conversations }, null, 2);
  }
}

export function titleOf(conversation) {
  return conversation.messages[0]?.content.trim().split("\n")[0].slice(0, 60) || "New conversation";
}

function withoutSteps(conversation) {
  return { ...conversation, messages: conversation.messages.map(({ steps, ...message }) => message) };
}

function keysOf(prefix) {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(prefix));
  } catch {
    return []; // a browser that keeps nothing
  }
}

function isKept(key) {
  return keysOf(key).includes(key);
}

function read(key, fallback, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(key)) ?? fallback;
  } catch {
    return fallback; // nothing, or nothing that can be read
  }
}

function write(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function erase(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // a browser that keeps nothing
  }
}
