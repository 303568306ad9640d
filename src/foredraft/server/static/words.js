// What the controller did and why, in words.

import { isDrafted } from "./answer.js";

// Why a run had no draft. The keys are the server's.
const NO_DRAFT = {
  "nothing proposed": "nothing was proposed",
  "would not pay": "checking the draft would have cost more time than it saves",
  ledger: "the proposer has not yet saved enough time to risk it",
  measuring: "it is still being measured how long runs take",
  resting: "all proposers rest, because querying does not pay now",
  "proposer failed": "a proposer failed and is left out",
  "controller failed": "the controller failed, so nothing is drafted",
};
const FIXED = "The spec is fixed, so there is nothing to decide";
const MOST_REASONS = 2; // of runs without a draft: the strip has room for three lines

// The decision of one step: its last reason is about the draft, those before it are about single proposers.
export function stepInWords(step) {
  const why = step.reasons.at(-1) ?? null;
  if (!isDrafted(step)) return why === null ? `${FIXED}: this run had no draft.` : `No draft in this run: ${noDraft(step)}.`;
  const by = joined([...new Set(step.draft.origins)].sort());
  const done = `${by} drafted ${count(step.draft.tokens.length, "token")}, ${step.accepted.length} accepted`;
  if (why === null) return `${done}. ${FIXED}.`;
  const probe = step.reasons.find((reason) => reason.endsWith(": probe"));
  return probe ? `${done}: ${proposerOf(probe)} is tried, to see whether it pays by now.` : `${done}: the draft was expected to save time.`;
}

// A whole answer: how many runs had a draft, why the others had none, and what came of it.
export function answerInWords(steps, savedS) {
  if (!steps.length) return "";
  const drafted = steps.filter(isDrafted).length;
  const had = `${drafted} of ${count(steps.length, "run")} had a draft`;
  const saved = savedS ? ` This ${savedS > 0 ? "saved" : "cost"} ${Math.abs(savedS).toFixed(2)} s.` : "";
  if (!steps.some((step) => step.reasons.length)) return `${FIXED}. ${had}.${saved}`;
  const tally = new Map();
  for (const step of steps) if (!isDrafted(step)) tally.set(noDraft(step), (tally.get(noDraft(step)) ?? 0) + 1);
  const others = [...tally].sort((a, b) => b[1] - a[1]);
  const told = others.slice(0, MOST_REASONS).map(([why, runs]) => ` ${runs} had none: ${why}.`);
  const rest = others.slice(MOST_REASONS).reduce((sum, [, runs]) => sum + runs, 0);
  if (rest) told.push(` ${rest} had none for other reasons.`);
  return `${had}${drafted ? " that was expected to save time" : ""}.${told.join("")}${saved}`;
}

function noDraft(step) {
  const decided = step.reasons.find((reason) => reason.endsWith("failed")) ?? step.reasons.at(-1) ?? "nothing proposed";
  const queries = step.reasons.filter((reason) => reason.includes(": "));
  const isQueried = queries.some((reason) => /: (drafted|probe)$/.test(reason));
  if (decided !== "nothing proposed" || isQueried || !queries.length) return meaning(decided);
  // Nothing was proposed because nobody was queried: why says more.
  const resting = queries.filter((reason) => reason.endsWith(": resting")).map(proposerOf);
  if (!resting.length) return meaning(queries.at(-1));
  return `${joined(resting)} ${resting.length > 1 ? "rest" : "rests"}, because querying does not pay now`;
}

function meaning(reason) {
  const key = reason.split(": ").at(-1);
  return Object.hasOwn(NO_DRAFT, key) ? NO_DRAFT[key] : reason;
}

const proposerOf = (reason) => reason.split(": ")[0];
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function joined(names) {
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : (names[0] ?? "");
}
