// The chat: messages of the current conversation, and the answer that is being written.

import { Answer, figuresOf } from "./answer.js";
import { byId, element } from "./dom.js";
import { requestFields, withSystem } from "./settings.js";
import { TokenView, drawLegend } from "./tokens.js";

const STARTERS = [
  "Rewrite this list as Markdown, one item a line: apples, pears, plums, apples, cherries, pears, plums, quinces.",
  "Write a Python class Point with x, y and z, and a property and a setter for each.",
  "Why is the sky blue?",
];

export class Chat {
  #abort = null;

  // `tell` has onProgress(answer), onChange(), onOpen(steps, step) and onError(error).
  constructor(conversations, settings, tell) {
    this.conversations = conversations;
    this.settings = settings;
    this.tell = tell;
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => this.#submit(event));
    byId("stop").addEventListener("click", () => this.stop());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("starters").append(
      ...STARTERS.map((text) => element("li", {}, element("button", { type: "button", class: "quiet", onclick: () => this.ask(text) }, text))),
    );
    this.draw();
  }

  get isBusy() {
    return this.#abort !== null;
  }

  get lastSteps() {
    return this.conversations.current.messages.findLast((message) => message.steps)?.steps ?? [];
  }

  stop() {
    this.#abort?.abort();
  }

  // The conversation as it is kept.
  draw() {
    const { messages } = this.conversations.current;
    byId("messages").replaceChildren(...messages.map((message) => this.#draw(message).item));
    byId("empty").hidden = messages.length > 0;
    this.drawLegend();
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  drawLegend() {
    drawLegend(byId("legend"), this.conversations.current.messages.flatMap((message) => message.steps ?? []));
  }

  #submit(event) {
    event.preventDefault();
    const text = this.prompt.value;
    if (text.trim() && !this.isBusy) this.ask(text);
  }

  async ask(text) {
    const conversation = this.conversations.current;
    let body;
    try {
      body = requestFields(this.settings);
    } catch (error) {
      return this.tell.onError(error);
    }
    this.prompt.value = "";
    conversation.messages.push({ role: "user", content: text });
    body.messages = withSystem(this.settings, conversation.messages.map(({ role, content }) => ({ role, content })));
    const message = { role: "assistant", content: "", steps: [] };
    conversation.messages.push(message);
    this.draw();
    this.tell.onChange();
    await this.#answer(body, message);
    if (!message.content && message.error) conversation.messages.splice(conversation.messages.indexOf(message), 1);
    this.conversations.save();
    this.tell.onChange();
  }

  async #answer(body, message) {
    const scroll = byId("scroll");
    const view = this.#draw(message);
    byId("messages").lastElementChild.replaceWith(view.item);
    view.item.classList.add("busy");
    byId("announcer").textContent = "The answer is being written.";
    this.#setBusy(new AbortController());
    const answer = await new Answer().run(body, this.#abort.signal, (now) => {
      const follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
      Object.assign(message, { content: now.text, steps: now.steps });
      view.tokens.show(now.text, now.steps);
      if (follows) scroll.scrollTop = scroll.scrollHeight;
      this.tell.onProgress(now);
    });
    Object.assign(message, { finish: answer.finish, seed: answer.seed, seconds: answer.seconds, perSecond: answer.perSecond });
    message.saved = answer.metrics?.speculative_decoding?.time_saved_s ?? 0;
    if (answer.error) message.error = answer.error.message;
    this.#setBusy(null);
    view.item.classList.remove("busy");
    view.figures.replaceChildren(...figures(message));
    this.drawLegend();
    scroll.scrollTop = scroll.scrollHeight;
    byId("announcer").textContent = answer.error ? answer.error.message : `Answer: ${answer.text}`;
    if (answer.error) this.tell.onError(answer.error);
  }

  #setBusy(abort) {
    this.#abort = abort;
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
  }

  #draw(message) {
    const isUser = message.role === "user";
    const body = element("div", { class: "body" });
    const about = element("div", { class: "figures" }, ...figures(message));
    const item = element("li", { class: `message ${message.role}` }, element("p", { class: "who" }, isUser ? "You" : "Model"), body, about);
    if (isUser) {
      body.textContent = message.content;
      return { item };
    }
    body.tabIndex = 0;
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", "Answer. With tints on, the arrow keys walk through its tokens.");
    const tokens = new TokenView(body, (step) => this.tell.onOpen(message.steps, step));
    tokens.show(message.content, message.steps ?? []);
    return { item, tokens, figures: about };
  }
}

function figures(message) {
  if (message.role === "user" || !message.finish) return [];
  const parts = [];
  if (message.steps?.length) {
    const { tokens, perRun } = figuresOf(message.steps);
    parts.push(`${tokens} tokens`, `${perRun.toFixed(2)} tokens per run`);
  }
  if (message.perSecond) parts.push(`${message.perSecond.toFixed(1)} tokens per second`);
  if (message.saved) parts.push(`${Math.abs(message.saved).toFixed(2)} s ${message.saved > 0 ? "saved" : "lost"}`);
  if (message.seed !== null && message.seed !== undefined) parts.push(`seed ${message.seed}`);
  if (message.finish === "length") parts.push("cut at the longest answer");
  if (message.finish === "stopped") parts.push("stopped");
  const line = [element("span", {}, parts.join(" · "))];
  if (message.error) line.push(element("span", { class: "failed" }, ` ${message.error}`));
  return line;
}
