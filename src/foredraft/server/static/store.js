// What this browser keeps: conversations and settings. Nothing of it leaves the browser but what is sent as a prompt.

const CONVERSATIONS = "foredraft.conversations";
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

export class Conversations {
  constructor() {
    this.all = read(CONVERSATIONS, []);
    this.current = this.all.find((each) => each.id === read(CURRENT, "")) ?? this.all[0] ?? this.#add();
  }

  create() {
    if (this.current.messages.length) this.open(this.#add());
  }

  open(conversation) {
    this.current = conversation;
    write(CURRENT, conversation.id);
  }

  // Returns how to have it back.
  remove(conversation) {
    const before = this.all;
    this.all = before.filter((each) => each !== conversation);
    if (this.current === conversation) this.open(this.all[0] ?? this.#add());
    this.save();
    return () => {
      this.all = before;
      this.open(conversation);
      this.save();
    };
  }

  // Conversations of a file, under ids of their own; the first one is opened.
  take(conversations) {
    this.all = this.all.filter((each) => each.messages.length);
    for (const each of conversations.toReversed()) this.open(this.#add(each));
    this.save();
  }

  #add(given = { created: new Date().toISOString(), messages: [] }) {
    const conversation = { ...given, id: crypto.getRandomValues(new Uint32Array(2)).join("-") };
    this.all.unshift(conversation);
    return conversation;
  }

  // Where the browser's space is used up, the steps of answers go first: they are many times larger than the texts.
  save() {
    const kept = this.all.filter((each) => each.messages.length);
    if (!write(CONVERSATIONS, kept)) write(CONVERSATIONS, kept.map(withoutSteps));
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

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback; // nothing, or nothing that can be read
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
