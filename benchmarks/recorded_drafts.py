"""Real drafts under the real controller, on machines of which only the numbers are known.

    make bench-drafts ARGS="record --suite questions.jsonl [--limit 78] [--dtype int4] [--out drafts.json]"
    make bench-drafts [ARGS="--drafts drafts.json --part kept-out"]

`record` writes the answers of a model, and for every position what `suffix` and the model's EAGLE head draft there.
Under greedy decoding neither depends on what was drafted before, so any policy can be replayed with the engine's own
step: what the controller decides about, and what is accepted, is real. The time of runs, queries and deciding is what
MACHINES says. Constants are chosen with every other answer; `kept-out` are the others. Printed are the speed of the
best fixed setting and of `auto` in units of plain decoding, the lowest kind of question in brackets.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import load_suite
from foredraft.config import EngineConfig
from foredraft.control.controller import Controller, Prices
from foredraft.control.costs import Calibration, Costs, Load
from foredraft.control.economics import VerifyCurve
from foredraft.proposers.base import Proposer
from foredraft.proposers.model.depths import Depths
from foredraft.proposers.model.tree import TreeShape
from foredraft.proposers.registry import ProposerChoice, Spec, parse_spec
from foredraft.simulate.engine import Clock, SimulatedEngine
from foredraft.types import NO_DRAFT, Draft, Sequence, Work

ROWS = (1, 2, 4, 8, 16, 32, 64)
ACCEPTANCE = (0.7531, 0.7501, 0.7856, 0.7876, 0.7866)  # that comes with the EAGLE head of the default model
VOCAB_SIZE = 1 << 18
SHAPE = TreeShape(depth=5, width=4, prunes=True, nodes=16)  # of the drafts that are recorded
SEEDS = (1, 2, 3)
FIXED: tuple[dict[str, int], ...] = (
    {"eagle": 1},
    {"eagle": 4},
    {"eagle": 16},
    {"suffix": 4},
    {"suffix": 16},
    {"suffix": 16, "eagle": 16},
)


class Answer(NamedTuple):
    """One request: its kind, the length of its prompt, the answer, and by length of the text so far the drafts of each
    proposer: tokens, parents and scores."""

    kind: str
    prompt: int
    tokens: list[int]
    drafts: dict[str, dict[str, tuple[list[int], list[int], list[float]]]]


class Machine(NamedTuple):
    """Milliseconds of a plain step, of a head's call, of each of its levels, of a query of `suffix` and of deciding.
    `rows` are runs of 1, 2, 4, … 64 rows in plain steps. `ahead`: a device runs all levels of a draft without looking
    at the tokens in between."""

    step: float
    rows: tuple[float, ...]
    head: float
    level: float
    suffix: float
    deciding: float
    ahead: bool = False

    @property
    def calibration(self) -> Calibration:
        return Calibration(VerifyCurve(ROWS, tuple(self.step / 1e3 * share for share in self.rows)), 0, 0.0)


_GPU = (1.0, 1.20, 1.21, 1.23, 1.28, 1.36, 1.54)  # the second row brings the work of the host for a tree
_GPU_15B = (1.0, 1.02, 1.03, 1.09, 1.14, 1.25, 1.40)
# Of a head's draft on the H200 the whole was measured, 0.68 ms with five levels; what of it a level takes is a guess.
MACHINES = {
    "H200": Machine(0.63, _GPU, 0.205, 0.095, 0.022, 0.09, ahead=True),
    "H200, slow host": Machine(0.63, _GPU, 0.275, 0.095, 0.03, 0.13, ahead=True),
    "H200, 1.5B": Machine(1.45, _GPU_15B, 0.225, 0.095, 0.022, 0.09, ahead=True),
    "Xeon, bfloat16": Machine(10.0, (1, 1.04, 1.11, 1.24, 1.5, 2.1, 3.4), 0.2, 0.6, 0.02, 0.2),
    "Xeon, int4": Machine(2.86, (1, 1.3, 1.75, 2.5, 3.8, 6.5, 12), 0.2, 0.45, 0.022, 0.2),
    "Xeon, 16 threads, int4": Machine(1.6, (1, 1.25, 1.45, 1.9, 2.4, 3.6, 6.0), 0.2, 0.3, 0.022, 0.2),
    "Neoverse-N1, bfloat16": Machine(10.9, (1, 1.3, 2, 3.2, 5.4, 10, 19), 0.45, 0.85, 0.03, 0.35),
    "Neoverse-N1, int4": Machine(5.4, (1, 1.32, 2.15, 3.95, 6.6, 12.3, 24.5), 0.45, 0.85, 0.03, 0.35),
}


class Deciding(Controller):
    """The controller, on a clock on which it takes its time to look at the sequences of a step."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        super().__init__(Costs(machine.calibration))
        self._deciding_s, self._clock = machine.deciding / 1e3, clock

    def prices(self, load: Load, nodes: int) -> Prices:
        if nodes:
            self._clock.now += self._deciding_s
        return super().prices(load, nodes)


class Recorded(Proposer):
    """Drafts what was recorded, and lets the time pass that it takes."""

    def __init__(self, name: str, most: int, machine: Machine, answers: Items[Answer], clock: Clock) -> None:
        self.name, self.num_lookahead_tokens, self.free = name, most, name == "suffix"
        self.acceptance = () if self.free else ACCEPTANCE
        self._query_s = (machine.suffix if self.free else machine.head) / 1e3
        self._level_s = 0.0 if self.free else machine.level / 1e3
        self._depths = Depths(SHAPE, SHAPE.shallower) if machine.ahead and not self.free else None
        self._missing_s = 0.0 if self.free else 4e-7 * machine.step
        self._answers, self._clock = answers, clock
        self._computed: dict[int, int] = {}  # tokens by sequence

    def num_missing(self, sequence: Sequence) -> int:
        missing = sequence.num_tokens - self._computed.get(sequence.id, 0)
        return 0 if self.free or missing <= 16 else missing

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        return [self._draft(*item, min_score) for item in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, budget: int, min_score: float) -> Draft:
        place = sequence.num_tokens
        self._clock.now += self._query_s + self._missing_s * (place - self._computed.get(sequence.id, 0))
        self._computed[sequence.id] = place
        drafts = self._answers[sequence.id].drafts.get(str(place), {})
        tokens, parents, scores = drafts.get(self.name, ([], [], []))
        best = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[: min(budget, len(tokens))]
        if self._depths is not None:
            return self._ahead(sequence, self._draft_of(tokens, parents, scores, best), min_score)
        # A node is drafted if its parent was worth going on from.
        best = [node for node in best if self.free or parents[node] < 0 or scores[parents[node]] > min_score]
        draft = self._draft_of(tokens, parents, scores, best)
        self._clock.now += self._level_s * draft.depth
        return draft

    def _ahead(self, sequence: Sequence, draft: Draft, min_score: float) -> Draft:
        assert self._depths is not None
        shape = self._depths.choose([sequence.id], min_score)
        self._clock.now += self._level_s * shape.depth
        draft = draft.only([node for node, depth in enumerate(draft.depths) if depth <= shape.depth])
        self._depths.learn(sequence.id, draft, shape)
        return draft

    def _draft_of(self, tokens: list[int], parents: list[int], scores: list[float], best: list[int]) -> Draft:
        nodes = sorted(best)
        if not nodes:
            return NO_DRAFT
        index = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
        return Draft(
            tuple(tokens[node] for node in nodes),
            tuple(index[parents[node]] for node in nodes),
            tuple(max(1e-6, scores[node]) for node in nodes),
            (self.name,) * len(nodes),
        )


def replay(
    machine: Machine, answers: list[Answer], fixed: dict[str, int] | None = None, seed: int = 1
) -> tuple[float, float]:
    """The speed over all answers in units of plain decoding, and that of the lowest kind. Prompts do not count."""
    clock, draw, steps = Clock(), random.Random(seed), [0]
    curve, most = machine.calibration.curve, fixed or {"suffix": 16, "eagle": 16}

    def takes(load: Load, accepted: int) -> float:
        steps[0] += 1
        delay = 3 if steps[0] % 97 == 0 else 1
        return curve.seconds_at(load.rows) * (1 + 0.2 * draw.random()) * delay

    engine = SimulatedEngine(
        replace(EngineConfig(), max_num_seqs=1),
        machine.calibration,
        VOCAB_SIZE,
        lambda choice: Recorded(choice.name, most[choice.name], machine, answers, clock),
        lambda sequence, position: [*answers[sequence.id].tokens, 0][
            min(position - answers[sequence.id].prompt, len(answers[sequence.id].tokens))
        ],
        takes,
        clock,
    )
    engine.speculation.controller = Deciding(machine, clock)
    spec = Spec(tuple(map(ProposerChoice, most)), adaptive=fixed is None)
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, answer in enumerate(answers):
        params = SamplingParams(temperature=0).resolved({})
        sequence = Sequence(number, "", 0, [0] * answer.prompt, answer.prompt, params, 0, len(answer.tokens))
        engine.add(sequence, spec)
        while not sequence.num_output_tokens:
            engine.step()
        before, emitted = clock.now, sequence.num_output_tokens
        while engine.scheduler.has_work:
            engine.step()
        plain_s = machine.step / 1e3 * 1.1 * (1 + 2 / 97)  # with the noise of runs
        kinds[answer.kind][0] += (len(answer.tokens) - emitted) * plain_s
        kinds[answer.kind][1] += clock.now - before
    plain, spent = (sum(times) for times in zip(*kinds.values(), strict=True))
    return plain / spent, min(plain / spent for plain, spent in kinds.values())


def record(arguments: argparse.Namespace) -> None:
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        spec="off",
        prefix_caching=False,
        max_num_seqs=1,
        threads=arguments.threads,
    )
    speculation, params = llm.engine.speculation, SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    propose, answers = speculation.propose, list[Answer]()
    made: dict[str, Any] = {}

    def recorded(works: list[Work]) -> list[Work]:
        """Ask all proposers, and verify nothing."""
        propose(works)
        step = speculation._step
        for index, offers in step.offers.items():
            made[str(step.works[index].sequence.num_tokens)] = {
                draft.origin[0]: (draft.tokens, draft.parents, draft.scores) for draft, _ in offers.values()
            }
        return works

    speculation.propose = recorded  # type: ignore[method-assign]
    for number, question in enumerate(load_suite(arguments.suite, arguments.limit)):
        made.clear()
        prompt = llm.encode([{"role": "user", "content": question.text}])
        llm.engine.add(str(number), prompt, params, parse_spec("suffix+eagle:nodes=16"))
        while llm.engine.has_work:
            for event in llm.engine.step():
                if event.output is not None:
                    answers.append(Answer(question.category, len(prompt), list(event.output.token_ids), dict(made)))
        print(f"{number + 1}: {question.category}", flush=True)
    Path(arguments.out).write_text(json.dumps(answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["record", "replay"], default="replay")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--suite", default="questions.jsonl")
    parser.add_argument("--limit", type=int, default=78)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", "--drafts", dest="out", default="drafts.json")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--part", choices=["all", "chosen-with", "kept-out"], default="all")
    arguments = parser.parse_args()
    if arguments.action == "record":
        record(arguments)
        return
    answers = [Answer(*answer) for answer in json.loads(Path(arguments.out).read_text())]
    answers = {"all": answers, "chosen-with": answers[::2], "kept-out": answers[1::2]}[arguments.part]
    for name, machine in MACHINES.items():
        speeds = {
            "+".join(f"{key}:{count}" for key, count in fixed.items()): replay(machine, answers, fixed)[0]
            for fixed in FIXED
        }
        best = max(speeds, key=speeds.__getitem__)
        autos = [replay(machine, answers, seed=seed) for seed in SEEDS]
        auto, lowest = (mean(figures) for figures in zip(*autos, strict=True))
        print(f"{name:24} best fixed {best:20} {speeds[best]:.2f}   auto {auto:.2f} ({lowest:.2f})", flush=True)


if __name__ == "__main__":
    main()
