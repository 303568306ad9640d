// What is inside a paragraph, heading or cell: code, links, emphasis. Returns what happens at which place of the text;
// all other characters are text. Time is linear in the length but for hostile nesting, which is cut off.

const LINK = /!?\[((?:[^[\]\\]|\\[^]|\[[^[\]]*\])*)\]\([ \t]*(<[^<>\n]*>|[^\s()<]*(?:\([^\s()]*\)[^\s()]*)*)(?:[ \t]+(?:"[^"\n]*"|'[^'\n]*'))?[ \t]*\)/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BARE_LINK = /https?:\/\/[^\s<>"`]{1,2000}/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPECIAL = /[\\`*_~[!<h]/g;
const SAFE_SCHEMES = ["http:", "https:", "mailto:"];
const MOST_DELIMITERS = 2000;

// Steps in the order of the text: { at, end, kind } where kind is "escape", "open" (with tag), "close", "code" or "link".
export function inlineSteps(text, hasLinks = true) {
  const steps = [];
  const delimiters = [];
  const ticks = new Map(); // lengths of runs of backticks that do not close anything from some place on
  for (let at = nextSpecial(text, 0); at < text.length; at = nextSpecial(text, at)) {
    const step = escapeAt(text, at) ?? codeAt(text, at, ticks) ?? (hasLinks ? linkAt(text, at) : null);
    if (step) {
      steps.push(step);
      at = step.end;
      continue;
    }
    const run = runAt(text, at);
    if ("*_~".includes(text[at]) && delimiters.length < MOST_DELIMITERS) delimiters.push(delimiter(text, at, run));
    at += run;
  }
  steps.push(...emphasis(delimiters));
  return steps.sort((a, b) => a.at - b.at);
}

// Only absolute addresses of these schemes; null for all others.
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SAFE_SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function nextSpecial(text, from) {
  SPECIAL.lastIndex = from;
  return SPECIAL.exec(text)?.index ?? text.length;
}

function runAt(text, at) {
  let end = at + 1;
  if ("*_~`".includes(text[at])) while (text[end] === text[at]) end += 1;
  return end - at;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function escapeAt(text, at) {
  const escapes = text[at] === "\\" && at + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[at + 1]);
  return escapes ? { at, end: at + 2, kind: "escape" } : null;
}

function codeAt(text, at, ticks) {
  if (text[at] !== "`") return null;
  const run = runAt(text, at);
  if (!ticks.has(run)) {
    for (let close = text.indexOf("`", at + run); close >= 0; ) {
      const found = runAt(text, close);
      if (found === run) return codeStep(text, at, run, close);
      close = text.indexOf("`", close + found);
    }
    ticks.set(run, true);
  }
  return null;
}

// One space at either end belongs to the marks, so that code can begin with a backtick.
function codeStep(text, at, run, close) {
  const inner = text.slice(at + run, close);
  const pad = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() ? 1 : 0;
  return { at, end: close + run, kind: "code", from: at + run + pad, to: close - pad };
}

function linkAt(text, at) {
  const bare = (found, cut) => ({ at, end: at + found[0].length, kind: "link", from: at + cut, to: at + found[0].length - cut, address: found[0].slice(cut, found[0].length - cut), isPlain: true });
  if (text[at] === "<") {
    const found = matchAt(AUTOLINK, text, at);
    return found && bare(found, 1);
  }
  if (text[at] === "h") {
    const found = /\w/.test(text[at - 1] ?? "") ? null : matchAt(BARE_LINK, text, at);
    return found && bare([withoutTail(found[0])], 0);
  }
  const found = text[at] === "[" || text.startsWith("![", at) ? matchAt(LINK, text, at) : null;
  if (!found) return null;
  const from = at + found[0].indexOf("[") + 1;
  return { at, end: at + found[0].length, kind: "link", from, to: from + found[1].length, address: found[2].replace(/^<|>$/g, ""), isPlain: false };
}

// Punctuation at the end of a bare address is the sentence's; so is a bracket that the address does not open.
function withoutTail(address) {
  let end = address.length;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (last === ")" && count(address, "(", end) >= count(address, ")", end)) break;
    if (!".,;:!?'*_~)]".includes(last)) break;
  }
  return address.slice(0, end);
}

const count = (text, letter, end) => text.slice(0, end).split(letter).length - 1;

// A run of * _ or ~, and whether it can open or close emphasis: by what stands on its two sides.
function delimiter(text, at, run) {
  const kind = text[at];
  const [before, after] = [text[at - 1] ?? " ", text[at + run] ?? " "];
  const opens = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
  const closes = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
  const inWord = kind === "_";
  return {
    kind,
    from: at,
    to: at + run,
    length: run,
    opens: opens && !(inWord && closes && !PUNCTUATION.test(before)) && (kind !== "~" || run === 2),
    closes: closes && !(inWord && opens && !PUNCTUATION.test(after)) && (kind !== "~" || run === 2),
  };
}

// Pairs of delimiters, as CommonMark pairs them: each closer takes the nearest opener of its kind.
function emphasis(delimiters) {
  const steps = [];
  const open = [];
  const bottoms = new Map(); // by kind of closer: below this place of `open` there is no opener for it
  for (const closer of delimiters) {
    while (closer.closes && closer.to > closer.from) {
      const key = `${closer.kind}${closer.opens}${closer.length % 3}`;
      const bottom = bottoms.get(key) ?? 0;
      let place = open.length - 1;
      while (place >= bottom && !fits(open[place], closer)) place -= 1;
      if (place < bottom) {
        bottoms.set(key, open.length);
        break;
      }
      const opener = open[place];
      const width = closer.kind === "~" || (opener.to - opener.from > 1 && closer.to - closer.from > 1) ? 2 : 1;
      const tag = closer.kind === "~" ? "s" : width === 2 ? "strong" : "em";
      steps.push({ at: opener.to - width, end: opener.to, kind: "open", tag }, { at: closer.from, end: closer.from + width, kind: "close" });
      opener.to -= width;
      closer.from += width;
      open.length = opener.to > opener.from ? place + 1 : place;
      for (const [each, bottom] of bottoms) bottoms.set(each, Math.min(bottom, open.length));
    }
    if (closer.opens && closer.to > closer.from) open.push(closer);
  }
  return steps;
}

function fits(opener, closer) {
  if (opener.kind !== closer.kind) return false;
  const either = opener.closes || closer.opens;
  return !either || (opener.length + closer.length) % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}
