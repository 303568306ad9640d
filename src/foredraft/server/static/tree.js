// The draft tree of a step: nodes by depth, the accepted path, and the token that the target added.

import { isDrafted, nodeDepths } from "./answer.js";
import { Canvas } from "./canvas.js";
import { byId, element, svg, visible } from "./dom.js";
import { childrenOf, tintOf } from "./tokens.js";
import { stepInWords } from "./words.js";

const LEVEL = 138; // pixels from one depth to the next
const ROW = 46;
const WIDTH = 112;
const HEIGHT = 34;

export class TreeView {
  #steps = [];
  #at = 0; // among the steps with drafts

  constructor() {
    this.canvas = new Canvas(byId("tree-canvas"));
    this.slider = byId("tree-step");
    this.slider.addEventListener("input", () => this.#go(Number(this.slider.value)));
    byId("tree-previous").addEventListener("click", () => this.#go(this.#at - 1));
    byId("tree-next").addEventListener("click", () => this.#go(this.#at + 1));
    byId("tree-in").addEventListener("click", this.canvas.in);
    byId("tree-out").addEventListener("click", this.canvas.out);
    byId("tree-fit").addEventListener("click", () => this.fit());
    this.show([]);
  }

  fit() {
    this.canvas.fit();
  }

  // All steps of one answer. The given one is drawn, with the token at `place` marked and in view; else the last that had
  // a draft. A step without a draft shows the next one that has one.
  show(steps, step = null, place = null) {
    const before = (index) => steps[index - 1]?.tokens.at(-1)?.text ?? ""; // "": the last token of the prompt
    this.#steps = steps.map((each, index) => ({ ...each, index, before: before(index) })).filter(isDrafted);
    this.slider.max = Math.max(0, this.#steps.length - 1);
    this.slider.disabled = !this.#steps.length;
    const wanted = step ? steps.indexOf(step) : steps.length;
    const found = this.#steps.findIndex((each) => each.index >= wanted);
    const isOwn = this.#steps[found]?.index === wanted;
    this.#go(found < 0 ? this.#steps.length - 1 : found, isOwn ? place : null);
  }

  #go(at, place = null) {
    this.#at = Math.max(0, Math.min(this.#steps.length - 1, at));
    this.slider.value = this.#at;
    byId("tree-previous").disabled = this.#at <= 0;
    byId("tree-next").disabled = this.#at >= this.#steps.length - 1;
    const step = this.#steps[this.#at];
    byId("tree-about").textContent = step ? describe(step) : "";
    if (!step) return byId("tree-canvas").replaceChildren(element("p", {}, "No draft yet. Ask for an answer with speculation, and its draft trees appear here."));
    const { children, width, height, boxes } = draw(step);
    this.canvas.put(children, width, height, describe(step));
    if (place !== null && boxes[place]) {
      boxes[place].box.classList.add("current");
      this.canvas.show(boxes[place].x, boxes[place].y);
    }
  }
}

function describe(step) {
  return `Run ${step.index + 1} emitted ${step.tokens.length} token${step.tokens.length === 1 ? "" : "s"}. ${stepInWords(step)}`;
}

// The picture, and the boxes of the tokens that the step emitted.
function draw(step) {
  const { draft, accepted } = step;
  const nodes = place(draft);
  const own = step.tokens[accepted.length]; // absent where an accepted token ended the answer
  const last = accepted.length ? nodes[accepted.at(-1)] : null;
  const rows = Math.max(1, ...nodes.map((node) => node.row + 1));
  const target = own && { depth: (last?.depth ?? 0) + 1, row: rows };
  const depth = Math.max(target?.depth ?? 0, ...nodes.map((node) => node.depth));
  const root = { depth: 0, row: nodes.length ? nodes[0].row : 0 };
  const height = (rows + (target ? 1 : 0)) * ROW;
  const isAccepted = (node) => accepted.includes(node);
  const edges = draft.parents.map((parent, node) => edge(parent < 0 ? root : nodes[parent], nodes[node], isAccepted(node) ? "accepted" : ""));
  edges.sort((a, b) => a.classList.contains("accepted") - b.classList.contains("accepted")); // accepted ones on top
  const drawn = draft.tokens.map((text, node) => {
    const score = `${(100 * draft.scores[node]).toFixed(0)} %`;
    return box(nodes[node], visible(text), score, isAccepted(node) ? "accepted" : "rejected", draft.origins[node]);
  });
  const children = [...edges, box(root, step.before ? visible(step.before) : "prompt", "before", "target", null), ...drawn];
  const boxes = accepted.map((node) => ({ box: drawn[node], x: x(nodes[node]) + WIDTH / 2, y: y(nodes[node]) + HEIGHT / 2 }));
  if (target) {
    const added = box(target, visible(own.text), "target", "target", null);
    children.push(edge(last ?? root, target, "target"), added);
    boxes.push({ box: added, x: x(target) + WIDTH / 2, y: y(target) + HEIGHT / 2 });
  }
  return { children, width: depth * LEVEL + WIDTH + 4, height: height - ROW + HEIGHT + 4, boxes };
}

// Every leaf has a row of its own; a node has the row of its first child.
function place(draft) {
  const depths = nodeDepths(draft);
  const nodes = depths.map((depth) => ({ depth, row: 0 }));
  let row = 0;
  const visit = (parent) => {
    for (const node of childrenOf(draft, parent)) {
      nodes[node].row = row;
      const before = row;
      visit(node);
      if (row === before) row += 1;
    }
  };
  visit(-1);
  return nodes;
}

const x = (node) => node.depth * LEVEL + 2;
const y = (node) => node.row * ROW + 2;

function edge(from, to, kind) {
  const [x1, y1, x2, y2] = [x(from) + WIDTH, y(from) + HEIGHT / 2, x(to), y(to) + HEIGHT / 2];
  const middle = x2 - 16;
  return svg("path", { class: kind, d: `M${x1} ${y1} L${middle} ${y1} C${middle + 8} ${y1} ${middle + 4} ${y2} ${x2} ${y2}` });
}

function box(node, text, note, kind, origin) {
  const shown = text.length > 13 ? `${text.slice(0, 12)}…` : text;
  return svg(
    "g",
    { class: kind, transform: `translate(${x(node)} ${y(node)})`, "data-tint": origin && tintOf(origin) },
    svg("title", {}, origin ? `${text} · ${origin} · ${note}` : text),
    svg("rect", { width: WIDTH, height: HEIGHT, rx: 7 }),
    svg("text", { x: 8, y: 15 }, shown),
    svg("text", { x: 8, y: 28, class: "score" }, origin ? `${origin} ${note}` : note),
  );
}
