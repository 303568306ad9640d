// A picture that fits its box and can be moved and zoomed: with mouse, wheel, fingers and keys.

import { svg } from "./dom.js";

const MARGIN = 18;
const LARGEST_FIT = 1.3;
const READABLE = 0.75; // below this scale, text of a picture is too small to read
const SCALES = [0.1, 4];
const STEP = 1.25;
const MOVE = 60; // pixels an arrow key moves it

export class Canvas {
  #size = { width: 1, height: 1 };
  #scale = 1;
  #x = 0; // of the picture's corner, in pixels of the box
  #y = 0;
  #isMoved = false; // by the reader: then a change of the box's size does not fit it again
  #fingers = new Map();

  constructor(box) {
    this.box = box;
    this.group = svg("g");
    this.root = svg("svg", { role: "img" }, this.group);
    box.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    box.addEventListener("pointerdown", (event) => this.#down(event));
    box.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) box.addEventListener(name, (event) => this.#fingers.delete(event.pointerId));
    box.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#isMoved || this.fit()).observe(box);
  }

  put(children, width, height, label) {
    this.group.replaceChildren(...children);
    this.root.setAttribute("aria-label", label);
    this.#size = { width, height };
    this.box.replaceChildren(this.root);
    this.fit();
  }

  fit() {
    const [width, height] = [this.box.clientWidth - 2 * MARGIN, this.box.clientHeight - 2 * MARGIN];
    if (width <= 0 || height <= 0) return; // not on the page
    this.#isMoved = false;
    this.#scale = Math.max(SCALES[0], Math.min(LARGEST_FIT, width / this.#size.width, height / this.#size.height));
    this.#centre(this.#size.width / 2, this.#size.height / 2);
  }

  // A place of the picture that is to be read: in the middle, if all of it cannot be shown in a readable size.
  show(x, y) {
    this.fit();
    if (this.#scale >= READABLE) return;
    this.#scale = 1;
    this.#isMoved = true;
    this.#centre(x, y);
  }

  zoom(factor, x = this.box.clientWidth / 2, y = this.box.clientHeight / 2) {
    const scale = Math.max(SCALES[0], Math.min(SCALES[1], this.#scale * factor));
    this.#x = x - ((x - this.#x) * scale) / this.#scale;
    this.#y = y - ((y - this.#y) * scale) / this.#scale;
    this.#scale = scale;
    this.#isMoved = true;
    this.#apply();
  }

  in = () => this.zoom(STEP);
  out = () => this.zoom(1 / STEP);

  #centre(x, y) {
    this.#x = this.box.clientWidth / 2 - x * this.#scale;
    this.#y = this.box.clientHeight / 2 - y * this.#scale;
    this.#apply();
  }

  #shift(x, y) {
    this.#x += x;
    this.#y += y;
    this.#isMoved = true;
    this.#apply();
  }

  #apply() {
    this.group.setAttribute("transform", `translate(${this.#x} ${this.#y}) scale(${this.#scale})`);
  }

  #wheel(event) {
    event.preventDefault();
    const { left, top } = this.box.getBoundingClientRect();
    this.zoom(Math.exp(-Math.max(-200, Math.min(200, event.deltaY)) / 300), event.clientX - left, event.clientY - top);
  }

  #down(event) {
    if (event.button) return;
    this.#fingers.set(event.pointerId, event);
    this.box.setPointerCapture(event.pointerId);
  }

  // One finger moves; two also zoom, around the one that rests.
  #move(event) {
    const before = this.#fingers.get(event.pointerId);
    if (!before) return;
    this.#fingers.set(event.pointerId, event);
    const other = [...this.#fingers.values()].find((each) => each.pointerId !== event.pointerId);
    if (!other) return this.#shift(event.clientX - before.clientX, event.clientY - before.clientY);
    const { left, top } = this.box.getBoundingClientRect();
    const distance = (finger) => Math.max(10, Math.hypot(finger.clientX - other.clientX, finger.clientY - other.clientY));
    this.zoom(distance(event) / distance(before), other.clientX - left, other.clientY - top);
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const actions = {
      "+": this.in,
      "=": this.in,
      "-": this.out,
      0: () => this.fit(),
      ArrowLeft: () => this.#shift(MOVE, 0),
      ArrowRight: () => this.#shift(-MOVE, 0),
      ArrowUp: () => this.#shift(0, MOVE),
      ArrowDown: () => this.#shift(0, -MOVE),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  }
}
