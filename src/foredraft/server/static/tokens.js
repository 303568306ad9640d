// Tokens on the page: tinted by who drafted them, with the rejected branches of their position on hover.

import { byId, element, visible } from "./dom.js";

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

// Shows an answer in an element and goes on where it stopped. `onOpen(step)` is called for a token that is chosen.
export class TokenView {
  #steps = [];
  #shown = 0; // steps that are on the page
  #text = ""; // and their text
  #current = -1;

  constructor(body, onOpen) {
    this.body = body;
    this.onOpen = onOpen;
    body.addEventListener("pointerover", (event) => this.#hover(event.target));
    body.addEventListener("pointerleave", hideTooltip);
    body.addEventListener("click", (event) => this.#open(event.target));
    body.addEventListener("keydown", (event) => this.#key(event));
    body.addEventListener("blur", () => this.#select(-1));
  }

  // Tokens add up to the text. Where they do not (a conversation that is kept without steps), the text is shown alone.
  show(text, steps) {
    this.#steps = steps;
    for (; this.#shown < steps.length; this.#shown++) {
      for (const [place, token] of steps[this.#shown].tokens.entries()) {
        this.#text += token.text;
        if (token.text) this.body.append(this.#span(token, this.#shown, place));
      }
    }
    if (this.#text !== text) {
      this.body.textContent = text;
      this.#text = text;
    }
  }

  #span(token, step, place) {
    const missed = rejectedAt(this.#steps[step], place).length > 0;
    const span = element("span", { class: missed ? "token missed" : "token", "data-step": step, "data-place": place }, token.text);
    const tint = tintOf(token.origin);
    if (tint) span.dataset.tint = tint;
    return span;
  }

  #isTinted() {
    return document.body.classList.contains("tinted");
  }

  #stepOf(target) {
    return target.dataset?.step === undefined ? null : this.#steps[Number(target.dataset.step)];
  }

  #hover(target) {
    const step = this.#stepOf(target);
    if (step && this.#isTinted()) showTooltip(target, step, Number(target.dataset.step), Number(target.dataset.place));
    else hideTooltip();
  }

  #open(target) {
    const step = this.#stepOf(target);
    if (step && this.#isTinted() && getSelection().isCollapsed) this.onOpen(step);
  }

  // Arrow keys walk through the tokens of an answer that has the focus; enter opens the tree.
  #key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!this.#isTinted() || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    if (move) this.#select(Math.max(0, Math.min(this.body.children.length - 1, this.#current + move)));
    else if (this.#current >= 0) this.#open(this.body.children[this.#current]);
  }

  #select(place) {
    this.body.children[this.#current]?.classList.remove("current");
    this.#current = place;
    const span = this.body.children[place];
    if (!span) return hideTooltip();
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    this.#hover(span);
    byId("announcer").textContent = `${span.textContent}: ${byId("tooltip").textContent}`;
  }
}

function showTooltip(target, step, index, place) {
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
  const at = target.getClientRects()[0];
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
