// Tokens on the page: tinted by who drafted them, with the rejected branches of their position on hover.

import { byId, element, visible } from "./dom.js";
import { Markdown } from "./markdown.js";

const TARGET = "target";
const TINTS = { suffix: 1, ngram: 2, grammar: 3, draft_model: 4, early_exit: 5, lookahead: 6, quantised: 7, staged: 8, eagle: 4, medusa: 5, dflash: 6, mtp: 7 };

export function tintOf(origin) {
  if (origin === TARGET) return null;
  return TINTS[origin] ?? 1 + ([...origin].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % 8);
}

// The branches that were drafted at a token's position and rejected, each from its first token down its likeliest path.
export function rejectedAt(step, place) {
  const { draft, accepted } = step;
  const parent = place ? accepted[place - 1] : -1;
  if (parent === undefined) return [];
  return childrenOf(draft, parent)
    .filter((node) => node !== accepted[place])
    .map((node) => ({ text: branchText(draft, node), origin: draft.origins[node], score: draft.scores[node] }));
}

export function childrenOf(draft, parent) {
  return draft.parents.flatMap((each, node) => (each === parent ? [node] : []));
}

function branchText(draft, node) {
  let text = "";
  for (let at = node; at !== undefined; [at] = childrenOf(draft, at)) text += draft.tokens[at];
  return text;
}

// An answer in an element: Markdown whose text knows its tokens. `onOpen(step, place)` is called for a token that is chosen.
export class AnswerView {
  #steps = [];
  #traced = []; // the tokens of all steps, as Writer takes them
  #tokens = []; // those of the text that is shown
  #counted = 0; // steps that are among them
  #text = ""; // what the traced tokens add up to: the thoughts with the marks around them, if any, and the text
  #shown = "";
  #isTraced = true;
  #current = -1; // the token that the keyboard has chosen

  constructor(body, onOpen) {
    this.body = body;
    this.onOpen = onOpen;
    this.markdown = new Markdown(body);
    body.addEventListener("pointerover", (event) => this.#hover(event.target));
    body.addEventListener("pointerleave", hideTooltip);
    body.addEventListener("click", (event) => this.#open(event.target));
    body.addEventListener("keydown", (event) => this.#key(event));
    body.addEventListener("blur", () => this.#select(-1));
  }

  // Where the tokens do not add up to the text (a conversation that is kept without steps), there are none. Those of
  // thoughts come before the text's.
  show(text, steps, hasThoughts = false) {
    this.#steps = steps;
    for (; this.#counted < steps.length; this.#counted++) this.#count(steps[this.#counted], this.#counted);
    const start = hasThoughts ? Math.max(0, this.#text.length - text.length) : 0;
    const isTraced = this.#text.slice(start) === text;
    this.#tokens = isTraced ? this.#after(start) : [];
    if (isTraced !== this.#isTraced || !text.startsWith(this.#shown)) this.markdown.clear();
    [this.#isTraced, this.#shown] = [isTraced, text];
    this.markdown.show(text, this.#tokens);
  }

  // The tokens beyond so many characters.
  #after(start) {
    if (!start) return this.#traced;
    return this.#traced.filter((token) => token.to > start).map((token) => ({ ...token, from: Math.max(0, token.from - start), to: token.to - start }));
  }

  #count(step, index) {
    for (const [place, token] of step.tokens.entries()) {
      if (!token.text) continue;
      const from = this.#text.length;
      this.#text += token.text;
      this.#traced.push({ from, to: this.#text.length, step: index, place, tint: tintOf(token.origin), missed: rejectedAt(step, place).length > 0 });
    }
  }

  #isTinted() {
    return document.body.classList.contains("tinted");
  }

  // The step and the place of the token that an element shows a piece of.
  #found(target) {
    const span = this.#isTinted() ? target.closest(".token") : null;
    if (!span) return null;
    const [index, place] = [Number(span.dataset.step), Number(span.dataset.place)];
    return { span, index, place, step: this.#steps[index] };
  }

  #hover(target) {
    const found = this.#found(target);
    if (found) showTooltip(found);
    else hideTooltip();
  }

  #open(target) {
    const found = target.closest("a, button") ? null : this.#found(target);
    if (found && getSelection().isCollapsed) this.onOpen(found.step, found.place);
  }

  // Arrow keys walk through the tokens of an answer that has the focus; enter opens the tree.
  #key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.target !== this.body || !this.#isTinted() || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    if (move) this.#select(Math.max(0, Math.min(this.#tokens.length - 1, this.#current + move)));
    else if (this.#current >= 0) this.#open(this.#pieces(this.#current)[0]);
  }

  #pieces(place) {
    const token = this.#tokens[place];
    return token ? [...this.body.querySelectorAll(`.token[data-step="${token.step}"][data-place="${token.place}"]`)] : [];
  }

  #select(place) {
    for (const piece of this.#pieces(this.#current)) piece.classList.remove("current");
    this.#current = place;
    const pieces = this.#pieces(place);
    if (!pieces.length) return hideTooltip();
    for (const piece of pieces) piece.classList.add("current");
    pieces[0].scrollIntoView({ block: "nearest" });
    this.#hover(pieces[0]);
    byId("announcer").textContent = `${pieces.map((piece) => piece.textContent).join("")}: ${byId("tooltip").textContent}`;
  }
}

function showTooltip({ span, step, index, place }) {
  const tip = byId("tooltip");
  const origin = step.tokens[place].origin;
  const who = origin === TARGET ? "the target's own token" : `drafted by ${origin}, accepted at depth ${place + 1}`;
  const rejected = rejectedAt(step, place);
  tip.replaceChildren(element("p", {}, `Step ${index + 1}: ${who}. `));
  if (rejected.length) {
    const rows = rejected.map(({ text, origin: by, score }) =>
      element("li", {}, element("s", {}, element("code", {}, visible(text))), element("span", { class: "muted" }, ` ${by}, ${(100 * score).toFixed(0)} % `)),
    );
    tip.append(element("p", { class: "muted" }, "Rejected here:"), element("ul", {}, ...rows));
  }
  tip.hidden = false;
  const at = span.getClientRects()[0];
  const below = at.bottom + tip.offsetHeight + 12 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - tip.offsetHeight - 6)}px`;
}

export function hideTooltip() {
  byId("tooltip").hidden = true;
}

// Says which tint is whose, for all that appear in these steps.
export function drawLegend(list, steps) {
  const origins = new Set(steps.flatMap((step) => [...step.draft.origins, ...step.tokens.map((token) => token.origin)]));
  origins.delete(TARGET);
  list.replaceChildren(
    ...[...origins].sort().map((origin) => element("li", {}, element("span", { class: "swatch", "data-tint": tintOf(origin) }), origin)),
    element("li", {}, element("span", { class: "swatch" }), "the target itself"),
    element("li", {}, element("span", { class: "swatch missed" }), "a draft was rejected here"),
    element("li", { class: "muted" }, "Point at a token to see what was rejected; click it to see its tree."),
  );
}
