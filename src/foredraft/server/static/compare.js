// A race: the same prompt and seed, plain and speculative, and the proof that both texts are equal.

import { Answer } from "./answer.js";
import { newSalt } from "./api.js";
import { byId, element } from "./dom.js";
import { requestFields, withSystem } from "./settings.js";

const EXAMPLE =
  "Write this text again and correct nothing: The plum tree stands in the garden. The plum tree bears plums. " +
  "The plums of the plum tree are blue, and the garden of the plum tree is green.";

class Lane {
  constructor(id, name) {
    this.place = element("span", {}, "");
    this.bar = element("i");
    this.text = element("div", { class: "text", tabindex: "0", role: "region", "aria-label": `Text, ${name}` });
    this.list = element("dl");
    byId(id).append(
      element("h2", { id: `${id}-name` }, name, this.place),
      element("div", { class: "bar", "aria-hidden": "true" }, this.bar),
      this.list,
      this.text,
    );
  }

  reset() {
    this.answer = null;
    this.text.textContent = "";
    this.list.replaceChildren();
    this.place.textContent = "waits";
    this.bar.style.width = "0";
  }

  async run(body, signal, onUpdate) {
    this.answer = new Answer();
    await this.answer.run(body, signal, (now) => {
      this.draw(now.text, now.seconds, now.figures.tokens / body.max_tokens);
      onUpdate(now);
    });
    const { tokens, runs, perRun, perSecond, seconds } = this.answer.figures;
    this.bar.style.width = "100%";
    const figures = { seconds: seconds.toFixed(2), tokens, runs, "tokens per run": perRun.toFixed(2), "tokens per second": perSecond.toFixed(1) };
    this.list.replaceChildren(...Object.entries(figures).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  }

  draw(text, seconds, share) {
    this.text.textContent = text;
    this.text.scrollTop = this.text.scrollHeight;
    this.place.textContent = `${seconds.toFixed(2)} s`;
    this.bar.style.width = `${100 * Math.min(1, share)}%`;
  }

  // As it was after so many milliseconds of its own race.
  drawAt(elapsed) {
    const { timeline, text } = this.answer;
    const reached = timeline.findLast(([at]) => at <= elapsed) ?? [0, 0];
    this.draw(text.slice(0, reached[1]), Math.min(elapsed / 1000, this.answer.seconds), reached[1] / text.length);
    return elapsed >= this.answer.seconds * 1000;
  }
}

export class Compare {
  #abort = null;

  constructor(settings, tell) {
    this.settings = settings;
    this.tell = tell;
    this.plain = new Lane("lane-plain", "Plain (off)");
    this.spec = new Lane("lane-spec", "Speculative");
    byId("compare-prompt").value = EXAMPLE;
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) this.stop();
      else this.#start();
    });
    byId("compare-prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.isBusy) this.#start();
    });
    byId("compare-replay").addEventListener("click", () => this.#replay());
  }

  get isBusy() {
    return this.#abort !== null;
  }

  stop() {
    this.#abort?.abort();
  }

  async #start() {
    const bodies = this.#bodies();
    if (!bodies) return;
    this.#tellVerdict("", "The race runs.");
    this.plain.reset();
    this.spec.reset();
    this.#setBusy(new AbortController());
    const { signal } = this.#abort;
    const plain = () => this.plain.run(bodies.plain, signal, () => {});
    const spec = () => this.spec.run(bodies.spec, signal, this.tell.onProgress);
    if (byId("compare-mode").value === "once") {
      await Promise.all([plain(), spec()]);
    } else {
      await plain();
      if (this.plain.answer.finish !== "error" && !signal.aborted) await spec();
    }
    this.#setBusy(null);
    this.#judge(bodies);
  }

  // Equal but for the speculation and the salt: with salts of their own neither finds what the other has left in caches.
  #bodies() {
    try {
      const fields = requestFields(this.settings);
      const both = {
        ...fields,
        max_tokens: fields.max_tokens ?? 256,
        messages: withSystem(this.settings, [{ role: "user", content: byId("compare-prompt").value }]),
      };
      const spec = fields.spec === "off" ? "auto" : fields.spec;
      return { plain: { ...both, spec: "off", cache_salt: newSalt() }, spec: { ...both, spec, cache_salt: newSalt() } };
    } catch (error) {
      this.tell.onError(error);
      return null;
    }
  }

  #judge(bodies) {
    const [plain, spec] = [this.plain.answer, this.spec.answer];
    const failed = [plain, spec].find((answer) => answer?.error);
    if (failed) {
      this.tell.onError(failed.error);
      return this.#tellVerdict("", "The race was not finished.");
    }
    if (!plain || !spec || plain.finish === "stopped" || spec.finish === "stopped") return this.#tellVerdict("", "The race was stopped.");
    byId("compare-replay").disabled = false;
    const { length, first } = compareBytes(plain.text, spec.text);
    const [slow, fast] = [plain.figures, spec.figures];
    const gain = `${fast.runs} runs instead of ${slow.runs}, ${(slow.seconds / fast.seconds).toFixed(2)}× the speed`;
    if (first < 0) return this.#tellVerdict("same", `✓ The same text: ${length} bytes compared, all equal (seed ${bodies.plain.seed}). ${gain}.`);
    const expected = bodies.plain.acceptance === "match" ? "" : ` The rule ${bodies.plain.acceptance} keeps the distribution, not the text.`;
    this.#tellVerdict("different", `✗ The texts differ at byte ${first}.${expected}`);
  }

  #replay() {
    const started = performance.now();
    const frame = () => {
      const elapsed = performance.now() - started;
      const done = [this.plain, this.spec].map((lane) => lane.drawAt(elapsed));
      if (!done.every(Boolean)) requestAnimationFrame(frame);
    };
    frame();
  }

  #setBusy(abort) {
    this.#abort = abort;
    byId("compare-start").textContent = abort ? "Stop" : "Start the race";
    byId("compare-replay").disabled = true;
  }

  #tellVerdict(kind, text) {
    byId("verdict").className = kind;
    byId("verdict").textContent = text;
  }
}

// How many bytes were compared, and where the first difference is; -1 where there is none.
function compareBytes(one, other) {
  const [a, b] = [one, other].map((text) => new TextEncoder().encode(text));
  const length = Math.max(a.length, b.length);
  for (let at = 0; at < length; at++) if (a[at] !== b[at]) return { length, first: at };
  return { length, first: -1 };
}
