// The settings of requests: sampling, speculation and grammar. Empty fields leave the choice to the server.

import { byId, element } from "./dom.js";
import { DEFAULTS, saveSettings } from "./store.js";

const NUMBERS = {
  temperature: ["Temperature", "0 is greedy", 0, 5, 0.05],
  top_p: ["top_p", "1 is off", 0, 1, 0.01],
  top_k: ["top_k", "0 is off", 0, 100000, 1],
  min_p: ["min_p", "0 is off", 0, 1, 0.01],
  repetition_penalty: ["Repetition penalty", "1 is off", 0.01, 10, 0.01],
  seed: ["Seed", "empty draws one", 0, Number.MAX_SAFE_INTEGER, 1],
  max_tokens: ["Longest answer", "tokens", 1, 1000000, 1],
};
const ACCEPTANCE = { match: "match: same text", rejection: "rejection: same distribution", block: "block: same distribution" };
const GRAMMARS = {
  none: "none",
  json_object: "any JSON object",
  schema: "JSON schema",
  regex: "regular expression",
  choice: "one of these lines",
  lark: "Lark grammar",
  gbnf: "GBNF grammar",
};

const THEMES = { system: "as the system", light: "light", dark: "dark" };

export class SettingsDialog {
  // `onChange` is called after every change.
  constructor(settings, onChange) {
    this.settings = settings;
    this.onChange = onChange;
    this.dialog = byId("settings");
    for (const id of ["open-settings", "effective"]) byId(id).addEventListener("click", () => this.open());
    byId("settings-reset").addEventListener("click", () => this.#reset());
    this.specs = element("datalist", { id: "specs" });
    this.#draw();
  }

  // The theme may have been changed elsewhere.
  open() {
    byId("set-theme").value = this.settings.theme;
    this.dialog.showModal();
  }

  // What this server allows, once it is known.
  showServer(stats) {
    this.specs.replaceChildren(...stats.allowed_specs.map((spec) => element("option", { value: spec })));
    byId("set-spec").placeholder = stats.spec;
    byId("set-max_tokens").max = stats.max_tokens;
  }

  #draw() {
    const text = (name, label, about, rows) => this.#field(name, label, about, element("textarea", { rows, spellcheck: "false" }), "whole");
    const numbers = Object.entries(NUMBERS).map(([name, [label, about, min, max, step]]) =>
      this.#field(name, label, about, element("input", { type: "number", min, max, step: step < 1 ? "any" : step, inputmode: "decimal" })),
    );
    byId("settings-fields").replaceChildren(
      text("system", "System prompt", "sent before the conversation", 2),
      this.#field("spec", "Speculation", "off, auto, ngram+suffix, …", element("input", { list: "specs", autocomplete: "off", spellcheck: "false" })),
      this.#field("acceptance", "Acceptance rule", "", choices(ACCEPTANCE)),
      this.#field("grammar_kind", "Answers follow", "a grammar", choices(GRAMMARS)),
      ...numbers,
      text("grammar", "Grammar", "the schema, expression, lines or grammar", 5),
      this.#field("theme", "Theme", "of this page", choices(THEMES)),
      this.specs,
    );
  }

  #field(name, label, about, control, kind = "") {
    control.id = `set-${name}`;
    control.value = this.settings[name];
    const wrong = element("span", { class: "wrong", id: `wrong-${name}`, role: "status" });
    control.setAttribute("aria-describedby", `about-${name} wrong-${name}`);
    control.addEventListener("input", () => this.#take(name, control, wrong));
    return element("div", { class: `field ${kind}` }, element("label", { for: control.id }, label), control, element("span", { class: "about", id: `about-${name}` }, about), wrong);
  }

  #take(name, control, wrong) {
    this.settings[name] = control.value;
    this.#changed();
    const isGrammar = name.startsWith("grammar"); // its kind and its text are right or wrong together
    const problem = isGrammar ? grammarProblem(this.settings) : control.validationMessage;
    (isGrammar ? byId("wrong-grammar") : wrong).textContent = problem;
    (isGrammar ? byId("set-grammar") : control).setAttribute("aria-invalid", String(Boolean(problem)));
  }

  #reset() {
    const { tints, theme } = this.settings;
    Object.assign(this.settings, DEFAULTS, { tints, theme });
    this.#changed();
    this.#draw();
  }

  #changed() {
    saveSettings(this.settings);
    this.onChange();
  }
}

function choices(options) {
  return element("select", {}, ...Object.entries(options).map(([value, label]) => element("option", { value }, label)));
}

function grammarProblem(settings) {
  try {
    grammarOf(settings);
    return "";
  } catch (error) {
    return error.message;
  }
}

// The fields of a request body, or an Error that says what is wrong.
export function requestFields(settings) {
  const fields = { acceptance: settings.acceptance, ...grammarOf(settings) };
  if (settings.spec.trim()) fields.spec = settings.spec.trim();
  for (const [name, [label, , min, max]] of Object.entries(NUMBERS)) {
    if (settings[name] === "") continue;
    const value = Number(settings[name]);
    if (!(value >= min && value <= max)) throw new Error(`${label} is ${settings[name]}; use a number from ${min} to ${max}.`);
    fields[name] = value;
  }
  fields.seed ??= crypto.getRandomValues(new Uint32Array(1))[0]; // the server's own seeds have more digits than a number here
  return fields;
}

// The fields of a request as a person reads them. With no temperature the model's own sampling is in force.
export function settingNames(fields) {
  const named = { Speculation: fields.spec ?? "the server's choice", "Acceptance rule": fields.acceptance, Temperature: fields.temperature ?? "the model's own sampling" };
  for (const [name, [label]] of Object.entries(NUMBERS)) if (fields[name] !== undefined) named[label] = fields[name];
  if (fields.grammar ?? fields.response_format) named.Grammar = "yes";
  return named;
}

// What holds for the next answer, in a line.
export function inForce(settings, server) {
  const parts = [settings.spec.trim() || server?.spec || "the server's speculation"];
  parts.push(settings.temperature === "" ? "the model's own sampling" : Number(settings.temperature) === 0 ? "greedy" : `temperature ${settings.temperature}`);
  for (const name of ["top_p", "top_k", "min_p"]) if (settings[name] !== "") parts.push(`${name} ${settings[name]}`);
  if (settings.seed !== "") parts.push(`seed ${settings.seed}`);
  if (settings.max_tokens !== "") parts.push(`at most ${settings.max_tokens} tokens`);
  if (settings.system.trim()) parts.push("a system prompt");
  if (settings.grammar_kind !== "none") parts.push(GRAMMARS[settings.grammar_kind]);
  return parts.join(" · ");
}

export function withSystem(settings, messages) {
  return settings.system.trim() ? [{ role: "system", content: settings.system }, ...messages] : messages;
}

function grammarOf({ grammar_kind: kind, grammar }) {
  if (kind === "none") return {};
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (!grammar.trim()) throw new Error("The grammar is empty; write one, or choose none.");
  if (kind === "choice") return { grammar: { choice: grammar.split("\n").filter((line) => line) } };
  if (kind !== "schema") return { grammar: { [kind]: grammar } };
  try {
    return { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(grammar) } } }; // strict: without properties of its own
  } catch (error) {
    throw new Error(`The JSON schema is no valid JSON: ${error.message}`);
  }
}
