// Puts ranges of an answer's source into elements, as text, and cuts them where tokens begin.
//
// Every character of the source enters the page once and in order. What a caller passes over, such as the asterisks of
// Markdown, becomes a mark: hidden, and shown with tints. So the textContent of what was written is the source.

import { element } from "./dom.js";

export class Writer {
  #at;
  #token; // the first that may reach beyond #at

  // `tokens` are { from, to, step, place, tint, missed } in the order of the source, without gaps, or none at all.
  constructor(source, tokens, from = 0) {
    this.source = source;
    this.tokens = tokens;
    this.leaf = null; // the block that was written to last: breaks after it become its marks
    this.#at = from;
    this.#token = firstAfter(tokens, from);
  }

  text(parent, from, to) {
    this.skip(parent, from);
    parent.append(...this.#pieces(to));
  }

  skip(parent, to) {
    if (to > this.#at) parent.append(element("span", { class: "mark" }, ...this.#pieces(to, true)));
  }

  #pieces(to, isMark = false) {
    const pieces = [];
    while (this.#at < to) {
      while (this.tokens[this.#token]?.to <= this.#at) this.#token += 1;
      const token = this.tokens[this.#token];
      const end = token ? Math.min(to, token.to) : to;
      const text = this.source.slice(this.#at, end);
      pieces.push(token ? tokenSpan(token, text, isMark) : text);
      this.#at = end;
    }
    return pieces;
  }
}

function tokenSpan(token, text, isMark) {
  const breaks = isMark && text.includes("\n") ? "↵".repeat(text.split("\n").length - 1) : null;
  return element(
    "span",
    { class: token.missed ? "token missed" : "token", "data-step": token.step, "data-place": token.place, "data-tint": token.tint, "data-breaks": breaks },
    text,
  );
}

function firstAfter(tokens, offset) {
  let [low, high] = [0, tokens.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].to <= offset) low = middle + 1;
    else high = middle;
  }
  return low;
}
