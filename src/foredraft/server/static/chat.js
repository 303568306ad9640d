// The chat: messages of the current conversation, and the answer that is being written.

import { Answer } from "./answer.js";
import { Paced, byId, element, isTouched, sendsOnEnter } from "./dom.js";
import { MessageView } from "./message.js";
import { requestFields, withSystem } from "./settings.js";
import { drawLegend } from "./tokens.js";

const STARTERS = [
  "Write a Python class Point with x, y and z, and a property and a setter for each.",
  "Compare apples, pears and plums in a table: colour, taste, season.",
  "Why is the sky blue?",
];
const SAVE_MS = 1000; // an answer that is being written is saved so often
const NEAR = 60; // pixels from the end: a reader who is so near follows the answer

export class Chat {
  #abort = null;
  #keep = null; // saves the answer that is being written

  // `tell` has onProgress(answer), onChange(), onOpen(steps, step, place), onRemoved(what, undo) and onError(error).
  constructor(conversations, settings, tell) {
    this.conversations = conversations;
    this.settings = settings;
    this.tell = tell;
    this.model = null; // once the server has told it
    this.prompt = byId("prompt");
    this.prompt.placeholder = isTouched.matches ? "Message" : "Message. Enter sends, Shift+Enter starts a new line.";
    byId("composer").addEventListener("submit", (event) => this.#submit(event));
    byId("stop").addEventListener("click", () => this.stop());
    addEventListener("pagehide", () => {
      this.#keep?.();
      this.stop();
    });
    sendsOnEnter(this.prompt, () => byId("composer").requestSubmit());
    byId("starters").append(
      ...STARTERS.map((text) => element("li", {}, element("button", { type: "button", class: "quiet", onclick: () => this.ask(text) }, text))),
    );
    this.draw();
  }

  get isBusy() {
    return this.#abort !== null;
  }

  // A conversation in which something is written, by the model or by the reader.
  get isAtWork() {
    return this.isBusy || byId("messages").querySelector(".edit") !== null;
  }

  get #messages() {
    return this.conversations.current.messages;
  }

  get lastSteps() {
    return this.#messages.findLast((message) => message.steps)?.steps ?? [];
  }

  stop() {
    this.#abort?.abort();
  }

  // The conversation as it is kept.
  draw() {
    const views = this.#messages.map((message) => this.#view(message));
    byId("messages").replaceChildren(...views.map((view) => view.item));
    byId("empty").hidden = views.length > 0;
    this.#drawLegend();
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
    return views;
  }

  #drawLegend() {
    drawLegend(byId("legend"), this.#messages.flatMap((message) => message.steps ?? []));
  }

  #view(message) {
    return new MessageView(message, {
      open: (step, place) => this.tell.onOpen(message.steps, step, place),
      edit: (text) => this.#again(message, () => this.ask(text)),
      regenerate: () => this.#again(message, () => this.#answer()),
      goOn: () => this.#goOn(message),
      remove: () => this.#remove(message),
    });
  }

  #submit(event) {
    event.preventDefault();
    const text = this.prompt.value;
    if (text.trim() && !this.isBusy) this.ask(text);
  }

  async ask(text) {
    if (!this.#fields()) return;
    this.prompt.value = "";
    this.#messages.push({ role: "user", content: text });
    await this.#answer();
  }

  // Drops a message and all after it, and does something in its place.
  async #again(message, act) {
    if (this.isBusy || !this.#fields()) return;
    this.#messages.splice(this.#messages.indexOf(message));
    await act();
  }

  // A question goes with its answer.
  #remove(message) {
    if (this.isBusy) return;
    const conversation = this.conversations.current;
    const before = [...conversation.messages];
    const place = before.indexOf(message);
    const next = before.findIndex((each, at) => at > place && each.role === "user");
    conversation.messages.splice(place, (next < 0 ? before.length : next) - place);
    this.#changed();
    this.tell.onRemoved("the message and its answer", () => {
      conversation.messages = before;
      this.#changed();
    });
    this.prompt.focus();
  }

  #changed() {
    this.conversations.save(this.conversations.current);
    this.draw();
    this.tell.onChange();
  }

  // The fields of a request; null where the settings are wrong, which is told.
  #fields() {
    try {
      return requestFields(this.settings);
    } catch (error) {
      this.tell.onError(error);
      return null;
    }
  }

  async #answer() {
    const fields = this.#fields();
    const message = { role: "assistant", content: "", steps: [], model: this.model, settings: fields };
    this.#messages.push(message);
    await this.#run(message, fields, this.#messages.slice(0, -1));
  }

  // The server continues an answer that is the last message.
  async #goOn(message) {
    const fields = this.#fields();
    if (this.isBusy || !fields) return;
    this.#messages.splice(this.#messages.indexOf(message) + 1);
    await this.#run(message, fields, this.#messages);
  }

  async #run(message, fields, messages) {
    const { conversations } = this;
    const conversation = conversations.current;
    const sent = messages.map(({ role, content, reasoning_content, name, tool_calls, tool_call_id }) => ({ role, content, reasoning_content, name, tool_calls, tool_call_id }));
    const before = { content: message.content, steps: message.steps ?? [], seconds: message.seconds ?? 0, saved: message.saved ?? 0, thoughts: message.reasoning_content ?? "", thoughtSeconds: message.thoughtSeconds ?? 0 };
    delete message.finish;
    delete message.error;
    conversations.save(conversation);
    const view = this.draw().at(-1);
    this.tell.onChange();
    const answer = await this.#read({ ...fields, messages: withSystem(this.settings, sent) }, view, before, conversation);
    message.finish = answer.finish;
    message.seed = answer.seed;
    message.seconds = before.seconds + answer.seconds;
    message.perSecond = answer.perSecond;
    message.saved = before.saved + (answer.metrics?.speculative_decoding?.time_saved_s ?? 0);
    if (answer.error) message.error = answer.error.message;
    if (!message.content && !message.reasoning_content && answer.error) conversation.messages.splice(conversation.messages.indexOf(message), 1);
    conversations.save(conversation);
    this.tell.onChange();
    if (conversation !== conversations.current) return;
    if (!conversation.messages.includes(message)) view.item.remove();
    view.drawFoot();
    this.#drawLegend();
    if (this.#isAtEnd) byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  #isAtEnd = true;

  async #read(body, view, before, conversation) {
    const { item, message } = view;
    const scroll = byId("scroll");
    const answer = new Answer();
    const take = () => {
      message.content = before.content + answer.text;
      message.steps = [...before.steps, ...answer.steps];
      if (!answer.thoughts) return;
      message.reasoning_content = before.thoughts + answer.thoughts;
      message.thoughtSeconds = before.thoughtSeconds + answer.thoughtSeconds;
    };
    const drawing = new Paced(() => {
      take();
      this.#isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
      view.show();
      if (this.#isAtEnd) scroll.scrollTop = scroll.scrollHeight;
      this.tell.onProgress(answer);
    });
    item.classList.add("busy");
    byId("announcer").textContent = "The answer is being written.";
    this.#setBusy(new AbortController());
    let savedAt = performance.now();
    this.#keep = () => {
      savedAt = performance.now();
      take();
      this.conversations.save(conversation);
    };
    await answer.run(body, this.#abort.signal, () => {
      drawing.soon();
      if (performance.now() - savedAt >= SAVE_MS) this.#keep();
    });
    drawing.now();
    this.#keep = null;
    this.#setBusy(null);
    item.classList.remove("busy");
    byId("announcer").textContent = answer.error ? answer.error.message : `Answer: ${answer.text}`;
    if (answer.error) this.tell.onError(answer.error);
    return answer;
  }

  #setBusy(abort) {
    this.#abort = abort;
    document.body.classList.toggle("answering", abort !== null);
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
  }
}
