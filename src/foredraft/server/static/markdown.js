// Markdown as elements, and nothing else: every element is made here by its name, and all text of the source is text.
// An answer that grows is written again from its last block on.

import { BlockParser, linesOf } from "./blocks.js";
import { copyButton, element } from "./dom.js";
import { highlights } from "./highlight.js";
import { inlineSteps, safeAddress } from "./inline.js";
import { Writer } from "./writer.js";

const FIRST_LEVEL = 3; // of headings in an answer: those of the page are above them

export class Markdown {
  #from = 0; // where the blocks begin that may still change
  #settled = 0; // elements before them
  #levels = []; // of the headings before them

  constructor(body) {
    this.body = body;
  }

  clear() {
    this.body.replaceChildren();
    [this.#from, this.#settled, this.#levels] = [0, 0, []];
  }

  // A source that begins with what was shown before, and its tokens: see Writer.
  show(source, tokens) {
    const parser = new BlockParser(source);
    const lines = linesOf(source, this.#from);
    const blocks = parser.parse(lines);
    const writer = new Writer(source, tokens, this.#from);
    const complete = source.endsWith("\n") ? lines : lines.slice(0, -1);
    const last = parser.parse(complete).at(-1)?.from ?? this.#from; // all before it is final
    while (this.body.childNodes.length > this.#settled) this.body.lastChild.remove();
    const levels = [...this.#levels];
    for (const [place, block] of blocks.entries()) {
      if (place && block.from === last) [this.#from, this.#settled, this.#levels] = [last, this.body.childNodes.length, [...levels]];
      this.body.append(new BlockWriter(writer, levels).write(block));
      writer.skip(writer.leaf, blocks[place + 1]?.from ?? source.length);
    }
    if (!blocks.length) writer.skip(this.body, source.length);
  }
}

class BlockWriter {
  // `levels` are those of the headings that the next one is below of.
  constructor(writer, levels) {
    this.writer = writer;
    this.levels = levels;
  }

  write(block) {
    return this[block.kind](block);
  }

  paragraph({ lines }) {
    return this.#leaf("p", {}, lines);
  }

  // Levels follow each other without gaps, whatever the model's are.
  heading({ level, lines }) {
    while (this.levels.length && this.levels.at(-1) >= level) this.levels.pop();
    this.levels.push(level);
    return this.#leaf(`h${Math.min(6, FIRST_LEVEL - 1 + this.levels.length)}`, { class: "heading", "data-level": level }, lines);
  }

  rule() {
    this.writer.leaf = element("div", { class: "rule", role: "separator" });
    return this.writer.leaf;
  }

  quote({ blocks }) {
    return this.#container("blockquote", blocks);
  }

  list({ start, items }) {
    const list = element(start === undefined ? "ul" : "ol", { start: start === undefined || Number(start) === 1 ? null : Number(start) });
    for (const [place, blocks] of items.entries()) {
      const item = this.#container("li", blocks);
      list.append(item);
      if (place + 1 < items.length && items[place + 1].length) this.writer.skip(this.writer.leaf, this.#lineStart(items[place + 1][0].from));
    }
    return list;
  }

  table({ head, align, rows, delimiters }) {
    const { writer } = this;
    const row = (tag, cells) => element("tr", {}, ...cells.map((cell, place) => this.#leaf(tag, { "data-align": align[place], scope: tag === "th" ? "col" : null }, [cell])));
    const top = element("thead", {}, row("th", head));
    writer.skip(writer.leaf, delimiters.next);
    const body = element("tbody", {}, ...rows.map((cells) => row("td", cells)));
    const table = element("table", {}, top, ...(rows.length ? [body] : []));
    return element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  }

  fence({ info, lines }) {
    const { writer } = this;
    const text = new Joined(lines, false);
    const code = text.of(writer.source);
    const [language] = writer.source.slice(info.at, info.end).split(/[\s:{,]/);
    const name = element("span", { class: "language" });
    const inner = element("code", {});
    const shown = element("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, inner);
    const box = element("div", { class: "code" }, element("div", { class: "code-top" }, name, copyButton("Copy this code", () => code.replace(/\n$/, ""))), shown);
    if (language) writer.text(name, info.at, info.at + language.length);
    if (lines.length) writer.skip(name, lines[0].at);
    let at = 0;
    for (const { from, to, kind } of highlights(code, language)) {
      text.write(writer, inner, at, from);
      const part = element("span", { class: `code-${kind}` });
      text.write(writer, part, from, to);
      inner.append(part);
      at = to;
    }
    text.write(writer, inner, at, code.length);
    writer.leaf = box.appendChild(element("div", { class: "code-end" }));
    return box;
  }

  #container(tag, blocks) {
    const box = element(tag);
    for (const [place, block] of blocks.entries()) {
      if (place) this.writer.skip(this.writer.leaf, this.#lineStart(block.from));
      box.append(this.write(block));
    }
    if (!blocks.length) this.writer.leaf = box;
    return box;
  }

  #lineStart(offset) {
    return this.writer.source.lastIndexOf("\n", offset - 1) + 1;
  }

  #leaf(tag, attributes, lines) {
    const leaf = element(tag, attributes);
    const text = new Joined(lines, true);
    new InlineWriter(this.writer, text).write(leaf, 0, text.of(this.writer.source).trimEnd().length);
    this.writer.leaf = leaf;
    return leaf;
  }
}

// Lines without what their containers took from them, as one text whose places are known in the source.
class Joined {
  constructor(lines, isTrimmed) {
    let start = 0;
    this.parts = lines.map(({ at, end, next }, place) => {
      const to = isTrimmed && place === lines.length - 1 ? end : next;
      const part = { start, from: at, to };
      start += to - at;
      return part;
    });
  }

  of(source) {
    return this.parts.map(({ from, to }) => source.slice(from, to)).join("");
  }

  // Writes a range of the text; all before it that is not written yet becomes marks.
  write(writer, parent, from, to) {
    for (let place = this.#partAt(from); place < this.parts.length && this.parts[place].start < to; place++) {
      const { start, from: source, to: end } = this.parts[place];
      writer.text(parent, source + Math.max(0, from - start), Math.min(end, source + to - start));
    }
  }

  skip(writer, parent, to) {
    const part = this.parts[this.#partAt(to - 1)];
    writer.skip(parent, part.from + to - part.start);
  }

  #partAt(offset) {
    let [low, high] = [0, this.parts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.parts[middle].start <= offset) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

class InlineWriter {
  constructor(writer, text) {
    this.writer = writer;
    this.text = text;
    this.plain = text.of(writer.source);
  }

  // What is passed over between two writes becomes marks.
  write(leaf, from, to, hasLinks = true) {
    const parents = [leaf];
    let at = from;
    for (const found of inlineSteps(this.plain.slice(from, to), hasLinks)) {
      const step = { ...found, at: found.at + from, end: found.end + from, from: found.from + from, to: found.to + from };
      this.#put(parents.at(-1), at, step.at);
      at = this[step.kind](step, parents);
    }
    this.#put(parents.at(-1), at, to);
  }

  #put(parent, from, to) {
    if (to > from) this.text.write(this.writer, parent, from, to);
  }

  // Every kind of step returns where the text goes on.
  escape({ at }) {
    return at + 1;
  }

  open({ tag, end }, parents) {
    parents.push(parents.at(-1).appendChild(element(tag)));
    return end;
  }

  close({ end }, parents) {
    return this.#end(parents.pop(), end);
  }

  code({ from, to, end }, parents) {
    const code = parents.at(-1).appendChild(element("code"));
    this.#put(code, from, to);
    return this.#end(code, end);
  }

  link({ from, to, end, address, isPlain }, parents) {
    const href = safeAddress(address);
    const link = href ? element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }) : element("span");
    parents.at(-1).append(link);
    if (isPlain) this.#put(link, from, to);
    else this.write(link, from, to, false);
    return this.#end(link, end);
  }

  #end(parent, end) {
    this.text.skip(this.writer, parent, end);
    return end;
  }
}
