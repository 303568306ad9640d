// A race: the same prompt and seed, plain and speculative, and the proof that both texts are equal.

import { Answer } from "./answer.js";
import { newSalt } from "./api.js";
import { Paced, byId, element, sendsOnEnter } from "./dom.js";
import { requestFields, withSystem } from "./settings.js";

const EXAMPLE =
  "Write this text again and correct nothing: The plum tree stands in the garden. The plum tree bears plums. " +
  "The plums of the plum tree are blue, and the garden of the plum tree is green.";

const prefersStillness = matchMedia("(prefers-reduced-motion: reduce)");
const AXIS_S = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]; // ends of the time axis while a race runs

// One of the two: its text, its figures, and a bar that shows how long it has run on the axis that both share.
class Lane {
  constructor(id, name) {
    this.place = element("span", {}, "");
    this.bar = element("i");
    this.text = element("div", { class: "text", tabindex: "0", role: "region", "aria-label": `Text, ${name}` });
    this.list = element("dl");
    this.box = byId(id);
    this.box.append(
      element("h2", { id: `${id}-name` }, name, this.place),
      element("div", { class: "bar", "aria-hidden": "true" }, this.bar),
      this.list,
      this.text,
    );
  }

  reset() {
    this.answer = null;
    this.list.replaceChildren();
    this.draw("", 0, "waits");
  }

  async run(body, signal, onUpdate) {
    this.answer = new Answer();
    const drawing = new Paced(() => {
      this.drawAt(Infinity);
      onUpdate(this.answer);
    });
    await this.answer.run(body, signal, () => drawing.soon());
    drawing.now();
    const { tokens, runs, perRun, perSecond, seconds } = this.answer.figures;
    const figures = { seconds: seconds.toFixed(2), tokens, runs, "tokens per run": perRun.toFixed(2), "tokens per second": perSecond.toFixed(1) };
    this.list.replaceChildren(...Object.entries(figures).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  }

  draw(text, seconds, state) {
    this.text.textContent = text;
    this.text.scrollTop = this.text.scrollHeight;
    this.seconds = seconds;
    this.place.textContent = state;
    this.box.classList.toggle("done", state.startsWith("✓"));
  }

  // As it was after so many seconds of its own; returns whether that is its end.
  drawAt(seconds) {
    const { timeline, written, finish } = this.answer;
    const isAtEnd = seconds >= this.answer.seconds;
    const isDone = Boolean(finish) && isAtEnd;
    const [, length] = isAtEnd ? [0, written.length] : (timeline.findLast(([at]) => at <= seconds * 1000) ?? [0, 0]);
    const shown = Math.min(seconds, this.answer.seconds);
    this.draw(written.slice(0, length), shown, `${isDone ? "✓ done after " : ""}${shown.toFixed(2)} s`);
    return isDone;
  }

  scale(longest) {
    this.bar.style.width = `${Math.min(100, (100 * this.seconds) / longest)}%`;
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
    sendsOnEnter(byId("compare-prompt"), () => this.isBusy || this.#start());
    byId("compare-replay").addEventListener("click", async () => {
      this.#setBusy(new AbortController());
      await this.#replay(this.#abort.signal);
      this.#setBusy(null);
      byId("compare-replay").disabled = false;
    });
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
    const isInTurn = byId("compare-mode").value === "turn";
    this.plain.reset();
    this.spec.reset();
    this.#setBusy(new AbortController());
    const { signal } = this.#abort;
    const plain = () => this.plain.run(bodies.plain, signal, () => this.#scale());
    const spec = () =>
      this.spec.run(bodies.spec, signal, (answer) => {
        this.#scale();
        this.tell.onProgress(answer);
      });
    if (isInTurn) {
      this.#tellVerdict("", "The plain run is measured first.");
      await plain();
      this.#tellVerdict("", "Now the speculative run is measured.");
      if (this.plain.answer.finish !== "error" && !signal.aborted) await spec();
    } else {
      this.#tellVerdict("", "Both run at once.");
      await Promise.all([plain(), spec()]);
    }
    if (isInTurn && this.#isComplete && !prefersStillness.matches) {
      this.#tellVerdict("", "Both are measured. This is the race, side by side and in real time.");
      await this.#replay(signal);
    }
    this.#setBusy(null);
    this.#judge(bodies);
  }

  get #lanes() {
    return [this.plain, this.spec];
  }

  get #isComplete() {
    return this.#lanes.every(({ answer }) => answer && ["stop", "length"].includes(answer.finish));
  }

  // Both bars on one axis: it ends with the slower run once both are known, and grows in steps until then.
  #scale() {
    const longest = Math.max(...this.#lanes.map((lane) => (lane.answer ? lane.answer.seconds : 0)));
    const end = this.#isComplete ? longest : (AXIS_S.find((seconds) => seconds >= longest) ?? longest);
    for (const lane of this.#lanes) lane.scale(end);
    byId("axis-end").textContent = `${this.#isComplete ? end.toFixed(2) : end} s`;
    byId("axis").hidden = false;
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
    const { length, first } = compareBytes(plain.written, spec.written);
    const [slow, fast] = [plain.figures, spec.figures];
    const gain = `${fast.runs} runs instead of ${slow.runs}, ${(slow.seconds / fast.seconds).toFixed(2)}× the speed`;
    if (first < 0) return this.#tellVerdict("same", `✓ The same text: ${length} bytes compared, all equal (seed ${bodies.plain.seed}). ${gain}.`);
    const expected = bodies.plain.acceptance === "match" ? "" : ` The rule ${bodies.plain.acceptance} keeps the distribution, not the text.`;
    this.#tellVerdict("different", `✗ The texts differ at byte ${first}.${expected}`);
  }

  // Both from their start, in real time, until the slower one is done; a stop shows the end at once.
  #replay(signal) {
    const started = performance.now();
    return new Promise((resolve) => {
      const frame = () => {
        const seconds = signal.aborted ? Infinity : (performance.now() - started) / 1000;
        const done = this.#lanes.map((lane) => lane.drawAt(seconds));
        this.#scale();
        if (done.every(Boolean)) resolve();
        else requestAnimationFrame(frame);
      };
      frame();
    });
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
