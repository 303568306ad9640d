// The blocks of Markdown: paragraphs, headings, rules, fences, quotes, lists, tables. Everything is a range of the source.
//
// A line is { at, end, next }: its content, and where the following line begins. Containers move `at` behind their own
// characters and parse what is left. A block is final once a complete line after it belongs to another block.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})(?:([-*+])|(\d{1,9})([.)]))(?:([ \t]+)|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const NESTED = 2; // an item's further lines have at least so many spaces
const MOST_NESTED = 12; // containers in containers; deeper ones stay text

export function linesOf(source, from = 0) {
  const lines = [];
  for (let at = from; at < source.length; ) {
    const found = source.indexOf("\n", at);
    const [end, next] = found < 0 ? [source.length, source.length] : [found, found + 1];
    lines.push({ at, end, next });
    at = next;
  }
  return lines;
}

export class BlockParser {
  constructor(source) {
    this.source = source;
  }

  // Blocks with the offset `from` and what their kind needs.
  parse(lines, depth = 0) {
    const blocks = [];
    for (let at = 0; at < lines.length; ) {
      if (this.#isBlank(lines[at])) {
        at += 1;
        continue;
      }
      const block = this.#blockAt(lines, at, depth);
      blocks.push({ ...block, from: lines[at].at });
      at = block.after;
    }
    return blocks;
  }

  // Every kind returns null or its block with `after`: the place of the first line that is not its own.
  #blockAt(lines, at, depth) {
    const nests = depth < MOST_NESTED;
    return (
      this.#fence(lines, at) ??
      this.#heading(lines, at) ??
      this.#rule(lines, at) ??
      (nests ? (this.#quote(lines, at, depth) ?? this.#list(lines, at, depth)) : null) ??
      this.#table(lines, at) ??
      this.#paragraph(lines, at)
    );
  }

  #text(line) {
    return this.source.slice(line.at, line.end);
  }

  #isBlank(line) {
    return !this.#text(line).trim();
  }

  #indent(line) {
    return this.#text(line).search(/[^ ]|$/);
  }

  #inner(line, width) {
    return { ...line, at: Math.min(line.end, line.at + Math.min(width, this.#indent(line))) };
  }

  #isFence(line) {
    const [, ticks, info] = FENCE.exec(this.#text(line)) ?? [];
    return ticks !== undefined && !(ticks[0] === "`" && info.includes("`")); // else a span of code
  }

  #fence(lines, at) {
    if (!this.#isFence(lines[at])) return null;
    const [, ticks, info] = FENCE.exec(this.#text(lines[at]));
    const width = this.#indent(lines[at]);
    const closes = new RegExp(`^ {0,3}${ticks[0]}{${ticks.length},}[ \\t]*$`);
    let last = at + 1;
    while (last < lines.length && !closes.test(this.#text(lines[last]))) last += 1;
    const name = lines[at].end - info.trimStart().length;
    const content = lines.slice(at + 1, last).map((line) => this.#inner(line, width));
    return { kind: "fence", info: { at: name, end: name + info.trim().length }, lines: content, after: Math.min(lines.length, last + 1) };
  }

  #heading(lines, at) {
    const text = this.#text(lines[at]);
    const found = HEADING.exec(text);
    if (!found) return null;
    const content = text.replace(/(?:^|[ \t])#+[ \t]*$/, "").trimEnd();
    const start = lines[at].at + found[0].length;
    return { kind: "heading", level: found[1].length, lines: [{ ...lines[at], at: start, end: Math.max(start, lines[at].at + content.length) }], after: at + 1 };
  }

  #rule(lines, at) {
    return RULE.test(this.#text(lines[at])) ? { kind: "rule", after: at + 1 } : null;
  }

  #quote(lines, at, depth) {
    const inner = [];
    let after = at;
    for (; after < lines.length; after++) {
      const found = QUOTE.exec(this.#text(lines[after]));
      if (!found) break;
      inner.push({ ...lines[after], at: lines[after].at + found[0].length });
    }
    return inner.length ? { kind: "quote", blocks: this.parse(inner, depth + 1), after } : null;
  }

  #itemAt(line) {
    const text = this.#text(line);
    const found = RULE.test(text) ? null : ITEM.exec(text);
    if (!found) return null;
    const [all, , bullet, number, end, space = ""] = found;
    const width = space.length > 4 || all.length === text.length ? all.length - space.length + Math.min(1, space.length) : all.length;
    return { width, sort: bullet ?? end, number, isEmpty: all.length === text.trimEnd().length };
  }

  #list(lines, at, depth) {
    const first = this.#itemAt(lines[at]);
    if (!first) return null;
    const items = [];
    let after = at;
    for (let next = at; next < lines.length; next = this.#skipBlank(lines, after)) {
      const item = this.#itemAt(lines[next]);
      if (item?.sort !== first.sort) break;
      const inner = [{ ...lines[next], at: Math.min(lines[next].end, lines[next].at + item.width) }];
      after = this.#restOfItem(lines, next + 1, item, inner);
      items.push(this.parse(inner, depth + 1));
    }
    return { kind: "list", start: first.number, items, after };
  }

  #skipBlank(lines, at) {
    while (at < lines.length && this.#isBlank(lines[at])) at += 1;
    return at;
  }

  // Lines that are indented, and those that go on with a paragraph without being indented.
  #restOfItem(lines, at, item, inner) {
    for (;;) {
      const next = this.#skipBlank(lines, at);
      if (next >= lines.length) return at;
      const isIndented = this.#indent(lines[next]) >= NESTED;
      if (!isIndented && (next > at || this.#itemAt(lines[next]) || this.#interrupts(lines, next))) return at;
      for (; at <= next; at++) inner.push(this.#inner(lines[at], item.width));
    }
  }

  #table(lines, at) {
    if (!this.#isTable(lines, at)) return null;
    const head = this.#cells(lines[at]);
    const align = this.#cells(lines[at + 1]).map(({ at: from, end }) => alignment(this.source.slice(from, end)));
    const rows = [];
    let after = at + 2;
    for (; after < lines.length && !this.#isBlank(lines[after]) && !this.#starts(lines, after); after++) rows.push(this.#cells(lines[after]).slice(0, head.length));
    return { kind: "table", head, align, rows, delimiters: lines[at + 1], after };
  }

  #isTable(lines, at) {
    if (at + 1 >= lines.length || !this.#text(lines[at]).includes("|")) return false;
    const under = this.#text(lines[at + 1]);
    return under.includes("-") && under.includes("|") && DELIMITERS.test(under) && this.#cells(lines[at]).length === this.#cells(lines[at + 1]).length;
  }

  // The trimmed cells of a row, as lines.
  #cells(line) {
    const [, open] = /^([ \t]*\|?)/.exec(this.#text(line));
    const cells = [];
    let from = line.at + open.length;
    for (let at = from; at <= line.end; at++) {
      if (at < line.end && this.source[at] === "\\") at += 1;
      else if (at === line.end || this.source[at] === "|") {
        const text = this.source.slice(from, at);
        if (at < line.end || text.trim()) cells.push({ at: at - text.trimStart().length, end: at - text.length + text.trimEnd().length, next: at });
        from = at + 1;
      }
    }
    return cells.map((cell) => ({ ...cell, end: Math.max(cell.at, cell.end) }));
  }

  #paragraph(lines, at) {
    let after = at + 1;
    while (after < lines.length && !this.#isBlank(lines[after]) && !this.#interrupts(lines, after)) after += 1;
    const own = lines.slice(at, after).map((line) => this.#inner(line, Infinity));
    return { kind: "paragraph", lines: own, after };
  }

  #starts(lines, at) {
    const text = this.#text(lines[at]);
    const item = this.#itemAt(lines[at]);
    return this.#isFence(lines[at]) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || (item !== null && !item.isEmpty && Number(item.number ?? 1) === 1);
  }

  // Whether a line ends the paragraph before it.
  #interrupts(lines, at) {
    return this.#starts(lines, at) || this.#isTable(lines, at);
  }
}

function alignment(text) {
  if (text.endsWith(":")) return text.startsWith(":") ? "centre" : "right";
  return "left";
}
