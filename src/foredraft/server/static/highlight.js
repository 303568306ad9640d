// Colours of code: comments, strings, numbers, keywords, names that are called. By shape alone, a pattern per language.

const WORDS = {
  c: "auto bool break case char class const continue default delete do double else enum extern false final float for goto if import inline int interface long namespace new null nullptr override package private protected public return short signed sizeof static struct super switch template this throw throws try true typedef union unsigned using virtual void volatile while",
  go: "break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range return select struct switch true type var",
  js: "async await break case catch class const continue debugger default delete do else enum export extends false finally for from function get if implements import in instanceof interface let new null of private public readonly return set static super switch this throw true try type typeof undefined var void while yield",
  python: "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield",
  rust: "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return Self self static struct super trait true type unsafe use where while",
  sh: "break case cd continue do done echo elif else esac exit export fi for function if in local read return set shift then unset until while",
  sql: "add all alter and as asc between by case create delete desc distinct drop else end exists foreign from group having if in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with",
};
const STRING = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`;
const PARTS = {
  c: { comment: SLASHES, string: STRING, keyword: WORDS.c, other: String.raw`^[ \t]*#[^\n]*` },
  css: { comment: String.raw`\/\*[^]*?(?:\*\/|(?![^]))`, string: STRING, keyword: "", other: String.raw`[\w-]+(?=[ \t]*:)|@[\w-]+|#[\da-fA-F]{3,8}\b` },
  diff: { comment: String.raw`^(?:@@|diff |index |--- |\+\+\+ )[^\n]*`, string: String.raw`^\+[^\n]*`, keyword: "", removed: String.raw`^-[^\n]*` },
  go: { comment: SLASHES, string: `${STRING}|\`[^\`]*\`?`, keyword: WORDS.go },
  html: { comment: "<!--[^]*?(?:-->|(?![^]))", string: STRING, keyword: "", other: String.raw`<\/?[\w:-]+|\/?>|[\w:-]+(?==)|&\w+;` },
  js: { comment: SLASHES, string: `${STRING}|\`(?:[^\`\\\\]|\\\\[^])*\`?`, keyword: WORDS.js },
  json: { comment: SLASHES, string: STRING, keyword: "true false null" },
  python: { comment: "#[^\\n]*", string: `[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^]))|${STRING})`, keyword: WORDS.python, other: String.raw`@[\w.]+` },
  rust: { comment: SLASHES, string: String.raw`"(?:[^"\\]|\\[^])*"?|'(?:[^'\\\n]|\\[^])'`, keyword: WORDS.rust, other: String.raw`\w+!|#!?\[[^\]\n]*\]` },
  sh: { comment: String.raw`(?<=^|\s)#[^\n]*`, string: STRING, keyword: WORDS.sh, other: String.raw`\$\{?[\w@#?*]+\}?|(?<=\s)--?[\w-]+` },
  sql: { comment: String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`, string: STRING, keyword: WORDS.sql, isCaseless: true },
  yaml: { comment: String.raw`(?<=^|\s)#[^\n]*`, string: STRING, keyword: "true false null yes no", other: String.raw`[\w.-]+(?=:(?:\s|$))|^\[[^\]\n]*\]` },
};
const NAMES = {
  bash: "sh", "c#": "c", "c++": "c", cc: "c", console: "sh", cpp: "c", cs: "c", csharp: "c", dart: "c", golang: "go", h: "c", hpp: "c", ini: "yaml", java: "c",
  javascript: "js", jsonc: "json", jsx: "js", kotlin: "c", patch: "diff", php: "c", py: "python", python3: "python", rs: "rust", scss: "css", shell: "sh",
  svg: "html", swift: "c", toml: "yaml", ts: "js", tsx: "js", typescript: "js", vue: "html", xhtml: "html", xml: "html", yml: "yaml", zsh: "sh",
};
const patterns = new Map();

// Ranges of the code with a class, in order; what lies between them has none.
export function highlights(code, language) {
  const name = language.toLowerCase();
  const known = Object.hasOwn(NAMES, name) ? NAMES[name] : name;
  if (!Object.hasOwn(PARTS, known)) return [];
  const found = [];
  for (const match of code.matchAll(patternOf(known))) {
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    if (match[0]) found.push({ from: match.index, to: match.index + match[0].length, kind });
  }
  return found;
}

function patternOf(name) {
  if (!patterns.has(name)) {
    const { comment, string, keyword, other = null, removed = null, isCaseless = false } = PARTS[name];
    const groups = { comment, string, removed, other, keyword: keyword && `\\b(?:${keyword.replaceAll(" ", "|")})\\b`, number: NUMBER, call: "\\b[A-Za-z_]\\w*(?=\\()" };
    const given = Object.entries(groups).filter(([, pattern]) => pattern);
    patterns.set(name, new RegExp(given.map(([kind, pattern]) => `(?<${kind}>${pattern})`).join("|"), isCaseless ? "gmi" : "gm"));
  }
  return patterns.get(name);
}
