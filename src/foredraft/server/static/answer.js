// One answer as it comes: its thoughts, its text, its steps, and the figures that follow from them.

import { chatChunks } from "./api.js";

export class Answer {
  constructor() {
    this.thoughts = ""; // what a reasoning model writes before its answer
    this.text = "";
    this.steps = []; // one per run of the target: tokens, draft, accepted nodes, reasons
    this.timeline = []; // [milliseconds since the request, length of all that is written]
    this.metrics = null; // the server's own, with the last chunk
    this.seed = null;
    this.finish = null; // "stop", "length", "stopped" by the reader, or "error"
    this.error = null;
    this.thinking = null; // the moments at which the first and the last thought came
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
  }

  // Runs a request to its end. Failures are told in `error`; `onUpdate` is called after every change.
  async run(body, signal, onUpdate) {
    this.startedAt = performance.now();
    try {
      for await (const chunk of chatChunks(body, signal)) {
        this.#take(chunk);
        onUpdate(this);
      }
    } catch (error) {
      this.finish = signal.aborted ? "stopped" : "error";
      this.error = signal.aborted ? null : error;
    }
    onUpdate(this);
    return this;
  }

  #take(chunk) {
    this.metrics = chunk.metrics ?? this.metrics;
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.delta.reasoning_content) {
      this.thoughts += choice.delta.reasoning_content;
      this.thinking = [this.thinking?.[0] ?? performance.now(), performance.now()];
    }
    this.text += choice.delta.content ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    this.seed = choice.seed ?? this.seed;
    if (choice.speculation_trace) {
      this.steps.push(...choice.speculation_trace);
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.timeline.push([this.lastAt - this.startedAt, this.written.length]);
    }
  }

  get written() {
    return this.thoughts && this.text ? `${this.thoughts}\n\n${this.text}` : this.thoughts + this.text;
  }

  get thoughtSeconds() {
    return this.thinking ? (this.thinking[1] - this.thinking[0]) / 1000 : 0;
  }

  get figures() {
    return { ...figuresOf(this.steps), seconds: this.seconds, perSecond: this.perSecond };
  }

  get seconds() {
    return ((this.lastAt ?? this.startedAt) - this.startedAt) / 1000;
  }

  // Tokens after the first step, over the time after it: the time to read the prompt is not decoding.
  get perSecond() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const tokens = countTokens(this.steps.slice(1));
    return seconds > 0 ? tokens / seconds : 0;
  }
}

const countTokens = (steps) => steps.reduce((sum, step) => sum + step.tokens.length, 0);

export function figuresOf(steps) {
  const tokens = countTokens(steps);
  const depths = []; // per depth from 1 on: drafts that reached it, and how often its token was accepted
  let drafted = 0;
  let accepted = 0;
  for (const step of steps) {
    drafted += step.draft.tokens.length;
    accepted += step.accepted.length;
    const depth = Math.max(0, ...nodeDepths(step.draft));
    while (depths.length < depth) depths.push({ drafted: 0, accepted: 0 });
    for (let each = 0; each < depth; each++) {
      depths[each].drafted += 1;
      depths[each].accepted += each < step.accepted.length;
    }
  }
  return { tokens, runs: steps.length, perRun: steps.length ? tokens / steps.length : 0, drafted, accepted, depths };
}

export function nodeDepths(draft) {
  const depths = [];
  for (const parent of draft.parents) depths.push(1 + (parent >= 0 ? depths[parent] : 0));
  return depths;
}

export const isDrafted = (step) => step.draft.tokens.length > 0;
