// One message: its text, what it took, and what can be done with it.

import { figuresOf } from "./answer.js";
import { copyButton, element } from "./dom.js";
import { settingNames } from "./settings.js";
import { AnswerView } from "./tokens.js";

const WHO = { user: "You", assistant: "Model", system: "System", tool: "Tool" };
const ENDS = { length: "cut at the longest answer", stopped: "stopped", interrupted: "interrupted" };

export class MessageView {
  // `actions` has edit(text), regenerate(), goOn(), remove() and open(step, place).
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = element("div", { class: "body" });
    this.foot = element("div", { class: "foot" });
    const who = WHO[message.role] + (message.name ? ` ${message.name}` : "");
    this.item = element("li", { class: `message ${message.role}` }, element("h2", { class: "who" }, who), this.body, this.foot);
    this.answer = message.role === "assistant" ? this.#answerView() : null;
    this.show();
    this.drawFoot();
  }

  #answerView() {
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Answer. With tints on, the arrow keys walk through its tokens.");
    return new AnswerView(this.body, this.actions.open);
  }

  show() {
    const { content, steps = [], tool_calls: calls = [], reasoning_content: thoughts } = this.message;
    if (thoughts) this.#showThoughts();
    if (!this.answer) this.body.textContent = content;
    else this.answer.show(content, steps, Boolean(thoughts));
    if (calls.length && !this.calls) {
      this.calls = calls.map((call) => element("p", { class: "call" }, "Calls ", element("code", {}, `${call.function.name}(${call.function.arguments})`)));
      this.body.after(...this.calls);
    }
  }

  #showThoughts() {
    if (!this.thoughts) {
      this.thoughts = new ThoughtsView();
      this.body.before(this.thoughts.box);
    }
    this.thoughts.show(this.message);
  }

  // Below the text: figures, settings and buttons, once the message is complete.
  drawFoot() {
    const { message } = this;
    this.thoughts?.show(message);
    const parts = [];
    if (message.role === "assistant" && message.finish) {
      parts.push(element("p", { class: "figures" }, ...figures(message)));
      if (message.settings) parts.push(settingsOf(message));
    }
    if (message.role !== "assistant" || message.finish) parts.push(this.#buttons());
    this.foot.replaceChildren(...parts);
  }

  #buttons() {
    const { message, actions } = this;
    const button = (label, about, onclick, kind = "") => element("button", { type: "button", class: `quiet ${kind}`, title: about, onclick }, label);
    const row = element("div", { class: "actions" }, copyButton("Copy this message", () => message.content));
    if (message.role === "user") row.append(button("Edit", "Change this message and ask again", () => this.#edit()), button("Delete", "Delete this message and its answer", actions.remove));
    if (message.role === "assistant") {
      if (canGoOn(message)) row.prepend(button("Go on", "Continue this answer where it ended", actions.goOn, "go-on"));
      row.append(button("Regenerate", "Ask again for this answer", actions.regenerate));
    }
    return row;
  }

  #edit() {
    const text = element("textarea", { rows: Math.min(12, 1 + this.message.content.split("\n").length), "aria-label": "Change the message" });
    text.value = this.message.content;
    const cancel = () => {
      this.body.hidden = false;
      this.drawFoot();
    };
    const form = element(
      "form",
      { class: "edit" },
      text,
      element("div", { class: "row" }, element("button", { type: "submit" }, "Send"), element("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"), element("span", { class: "muted small" }, "What follows this message is replaced.")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (text.value.trim()) this.actions.edit(text.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      cancel();
    });
    this.body.hidden = true;
    this.foot.replaceChildren(form);
    text.focus();
  }
}

// What a reasoning model wrote before its answer: folded, and as plain text.
class ThoughtsView {
  #shown = "";

  constructor() {
    this.title = element("summary");
    this.text = element("div", { class: "thought" });
    this.box = element("details", { class: "thoughts" }, this.title, this.text);
  }

  // Thoughts only grow.
  show({ content, finish, reasoning_content: thoughts, thoughtSeconds }) {
    this.text.append(thoughts.slice(this.#shown.length));
    this.#shown = thoughts;
    const isThinking = !content && !finish;
    this.title.textContent = isThinking ? "Thinking …" : thoughtSeconds ? `Thought for ${Math.max(1, Math.round(thoughtSeconds))} s` : "Thoughts";
  }
}

// An answer that a grammar shaped cannot: the grammar would begin anew.
function canGoOn({ finish, content, settings = {} }) {
  return Object.hasOwn(ENDS, finish) && content !== "" && !settings.grammar && !settings.response_format;
}

function figures(message) {
  const parts = [];
  if (message.steps?.length) {
    const { tokens, perRun } = figuresOf(message.steps);
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`, `${perRun.toFixed(2)} tokens per run`);
  }
  if (message.perSecond) parts.push(`${message.perSecond.toFixed(1)} tokens per second`);
  if (message.saved) parts.push(`${Math.abs(message.saved).toFixed(2)} s ${message.saved > 0 ? "saved" : "lost"}`);
  if (Object.hasOwn(ENDS, message.finish)) parts.push(ENDS[message.finish]);
  const line = [element("span", {}, parts.join(" · "))];
  if (message.error) line.push(element("span", { class: "failed" }, ` ${message.error}`));
  return line;
}

function settingsOf({ model, settings, seed }) {
  const rows = { Model: model, ...settingNames({ ...settings, seed: seed ?? settings.seed }) };
  const list = Object.entries(rows).filter(([, value]) => value !== undefined && value !== null);
  return element(
    "details",
    { class: "settings" },
    element("summary", {}, "Model and settings"),
    element("dl", {}, ...list.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value))))),
  );
}
