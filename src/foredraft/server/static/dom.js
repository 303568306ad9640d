// Elements. Text enters the page here and only as text: nothing that a model writes becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Where fingers type, Enter makes a line, as keyboards of phones show it.
export const isTouched = matchMedia("(pointer: coarse)");

export function sendsOnEnter(box, send) {
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return;
    event.preventDefault();
    send();
  });
}

// Draws when asked to, at most once per frame, and then rests for longer than the drawing took.
export class Paced {
  #isWaiting = false;
  #restUntil = 0;

  constructor(draw) {
    this.draw = draw;
  }

  soon() {
    if (this.#isWaiting) return;
    this.#isWaiting = true;
    setTimeout(() => requestAnimationFrame(() => this.#isWaiting && this.now()), Math.max(0, this.#restUntil - performance.now()));
  }

  now() {
    this.#isWaiting = false;
    const begun = performance.now();
    this.draw();
    const took = performance.now() - begun;
    this.#restUntil = took > 4 ? begun + 4 * took : 0;
  }
}

// A button without text of its own: its label is drawn by the styles, so that it is no part of the text around it.
export function copyButton(label, textOf) {
  const button = element("button", { type: "button", class: "quiet copy", "aria-label": label, title: label, "data-label": "Copy" });
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    button.dataset.label = (await copyText(textOf())) ? "Copied" : "Not allowed";
    byId("announcer").textContent = button.dataset.label;
    setTimeout(() => (button.dataset.label = "Copy"), 1500);
  });
  return button;
}

// Browsers have a clipboard only where a page comes from this machine or by HTTPS; elsewhere a selection is copied.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = element("textarea", { class: "hidden", "aria-hidden": "true" });
    box.value = text;
    const focused = document.activeElement;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return done;
  }
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// Spaces and line breaks of a token, made visible where the token stands alone.
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}
