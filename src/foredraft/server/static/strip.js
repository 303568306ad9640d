// The live strip: speed, tokens per run, acceptance by depth, the server's load, and what the controller chose and why.

import { isDrafted } from "./answer.js";
import { byId, element } from "./dom.js";

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
    for (const name of ["speed", "perRun", "accepted", "load", "why"]) this.parts[name].value.textContent = "–";
    this.meter = element("i");
    this.share = element("span", {}, " –");
    this.parts.kv.value.append(element("span", { class: "meter", "aria-hidden": "true" }, this.meter), this.share);
    this.parts.why.box.classList.add("why");
    byId("strip").append(...Object.values(this.parts).map((part) => part.box));
  }

  showAnswer(answer) {
    const { perSecond, perRun, drafted, accepted, depths, reasons } = answer.figures;
    this.parts.speed.value.textContent = perSecond ? perSecond.toFixed(1) : "–";
    this.parts.perRun.value.textContent = perRun ? perRun.toFixed(2) : "–";
    this.parts.accepted.value.textContent = `${accepted} / ${drafted}`;
    this.#showDepths(depths.slice(0, MOST_DEPTHS));
    const step = answer.steps.at(-1);
    if (step) this.parts.why.value.textContent = decision(step, reasons, answer);
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

// While an answer runs: the last step. When it is complete: all steps by reason, and what the server says was saved.
function decision(step, reasons, answer) {
  const saved = answer.metrics?.speculative_decoding?.time_saved_s;
  if (answer.finish && reasons.size) {
    const tally = [...reasons].sort((a, b) => b[1] - a[1]).map(([reason, steps]) => `${steps}× ${reason}`);
    return tally.join(" · ") + (saved ? ` · ${saved > 0 ? "saved" : "lost"} ${Math.abs(saved).toFixed(2)} s` : "");
  }
  const why = step.reasons.length ? step.reasons.join(", ") : "the spec is fixed";
  if (!isDrafted(step)) return `no draft (${why})`;
  return `${step.draft.tokens.length} drafted, ${step.accepted.length} accepted (${why})`;
}

function figure(name) {
  const value = element("span", {});
  return { box: element("div", { class: "figure" }, element("span", {}, name), value), value };
}
