// The live strip: speed, tokens per run, acceptance by depth, the server's load, and what the controller chose and why.

import { byId, element } from "./dom.js";
import { answerInWords, stepInWords } from "./words.js";

const MOST_DEPTHS = 12;

export class Strip {
  constructor() {
    this.parts = {
      speed: figure("tokens per second"),
      perRun: figure("tokens per run"),
      depths: figure("accepted by depth"),
      accepted: figure("accepted of drafted"),
      kv: figure("KV cache in use"),
      load: figure("running, waiting"),
      why: figure("controller"),
    };
    this.parts.depths.value.append(element("span", { class: "depths", role: "img", "aria-label": "no drafts yet" }));
    this.parts.why.value.textContent = "Tells what it decided, and why, once an answer is written.";
    for (const name of ["speed", "perRun", "accepted", "load"]) this.parts[name].value.textContent = "–";
    this.meter = element("i");
    this.share = element("span", {}, " –");
    this.parts.kv.value.append(element("span", { class: "meter", "aria-hidden": "true" }, this.meter), this.share);
    this.parts.why.box.classList.add("why");
    for (const name of ["accepted", "kv", "load"]) this.parts[name].box.classList.add("roomy");
    byId("strip").append(...Object.values(this.parts).map((part) => part.box));
  }

  showAnswer(answer) {
    const { perSecond, perRun, drafted, accepted, depths } = answer.figures;
    this.parts.speed.value.textContent = perSecond ? perSecond.toFixed(1) : "–";
    this.parts.perRun.value.textContent = perRun ? perRun.toFixed(2) : "–";
    this.parts.accepted.value.textContent = `${accepted} / ${drafted}`;
    this.#showDepths(depths.slice(0, MOST_DEPTHS));
    const step = answer.steps.at(-1);
    const saved = answer.metrics?.speculative_decoding?.time_saved_s;
    if (step) this.parts.why.value.textContent = answer.finish ? answerInWords(answer.steps, saved) : stepInWords(step);
  }

  showLoad(stats) {
    const used = 100 * stats.kv_use;
    this.meter.style.width = `${used}%`;
    this.share.textContent = ` ${used > 0 && used < 1 ? used.toFixed(1) : used.toFixed(0)} %`;
    this.parts.load.value.textContent = `${stats.running}, ${stats.waiting}`;
  }

  #showDepths(depths) {
    const bars = depths.map(({ drafted, accepted }) => {
      const bar = element("i");
      bar.style.setProperty("--share", `${(100 * accepted) / drafted}%`);
      return bar;
    });
    const told = depths.map(({ drafted, accepted }, at) => `depth ${at + 1}: ${accepted} of ${drafted}`).join(", ");
    const list = this.parts.depths.value.firstChild;
    list.replaceChildren(...bars);
    list.setAttribute("aria-label", told || "no drafts yet");
    list.title = told;
  }
}

function figure(name) {
  const value = element("span", {});
  return { box: element("div", { class: "figure" }, element("span", {}, name), value), value };
}
