"""Real drafts under the real controller, on machines of which only the numbers are known.

    make bench-drafts ARGS="record --suite questions.jsonl [--limit 60] [--dtype int4] [--out drafts.json]"
    make bench-drafts [ARGS="--drafts drafts.json"]

`record` writes the answers of a model, and for every position what `suffix` and the model's EAGLE head draft there.
Under greedy decoding neither depends on what was drafted before, so any policy can be replayed: what the controller
decides about, and what is accepted, is real. The time of runs, queries and deciding is what MACHINES says. Printed are
the speed of the best fixed setting and of `auto` in units of plain decoding, the lowest kind of question in brackets.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from tests.unit.controller_world import ROWS, Player, World

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import load_suite
from foredraft.budget import Budget
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.proposers.registry import parse_spec
from foredraft.types import NO_DRAFT, Draft, Sequence, Work

ACCEPTANCE = (0.7531, 0.7501, 0.7856, 0.7876, 0.7866)  # that comes with the EAGLE head of the default model
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
    """Milliseconds of a plain step, of a head's call, of each of its nodes (0: all levels run in any case, on the
    device), of a query of `suffix` and of deciding. `rows` are runs of 1, 2, 4, … 64 rows in plain steps."""

    step: float
    rows: tuple[float, ...]
    head: float
    node: float
    suffix: float
    deciding: float

    @property
    def calibration(self) -> Calibration:
        return Calibration(VerifyCurve(ROWS, tuple(self.step / 1e3 * share for share in self.rows)), 0, 0.0)


_GPU = (1.0, 1.18, 1.19, 1.21, 1.26, 1.34, 1.52)  # the second row brings the work of the host for a tree
MACHINES = {
    "H200": Machine(0.645, _GPU, 0.66, 0.0, 0.03, 0.15),
    "H200, slow host": Machine(0.645, _GPU, 0.66, 0.0, 0.03, 0.25),
    "Xeon, bfloat16": Machine(10.0, (1, 1.04, 1.11, 1.24, 1.5, 2.1, 3.4), 0.6, 0.2, 0.02, 0.12),
    "Xeon, int4": Machine(5.5, (1, 1.27, 1.7, 2.4, 3.6, 6.2, 12), 0.6, 0.2, 0.02, 0.12),
    "Neoverse-N1, bfloat16": Machine(10.9, (1, 1.3, 2, 3.2, 5.4, 10, 19), 0.45, 0.85, 0.03, 0.25),
    "Neoverse-N1, int4": Machine(5.4, (1, 1.32, 2.15, 3.95, 6.6, 12.3, 24.5), 0.45, 0.85, 0.03, 0.25),
}


@dataclass
class Recorded(Player):
    """Drafts what was recorded. A right token is its own position, as the world has it, any other a negative number."""

    answers: list[Answer] = field(default_factory=list)

    def query(self, sequence: Sequence, budget: int) -> tuple[Draft, float]:
        self.queries += 1
        start, answer = sequence.num_tokens, self.answers[sequence.id]
        seconds = self.query_s + self.missing_s * (start - self.computed.get(sequence.id, 0))
        self.computed[sequence.id] = start
        tokens, parents, scores = answer.drafts.get(str(start), {}).get(self.name, ([], [], []))
        best = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[: min(budget, self.most)]
        least = budget.least + budget.beyond if isinstance(budget, Budget) and self.node_s else 0.0
        nodes = sorted(node for node in best if scores[node] > least or node == best[0])
        depths, named = {-1: 0}, list[int]()
        for node in nodes:
            place = start - answer.prompt + depths.get(parents[node], len(answer.tokens))
            is_right = place < len(answer.tokens) and answer.tokens[place] == tokens[node]
            if is_right:
                depths[node] = depths[parents[node]] + 1
            named.append(answer.prompt + place if is_right else -1 - tokens[node])
        if not nodes:
            return NO_DRAFT, seconds
        index = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
        draft = Draft(
            tuple(named),
            tuple(index[parents[node]] for node in nodes),
            tuple(max(1e-6, scores[node]) for node in nodes),
            (self.name,) * len(nodes),
        )
        return draft, seconds + self.node_s * len(nodes)


def replay(
    machine: Machine, answers: list[Answer], fixed: dict[str, int] | None = None, seed: int = 1
) -> tuple[float, float]:
    """The speed over all answers in units of plain decoding, and that of the lowest kind."""
    suffix = Recorded("suffix", lambda place: 0.0, query_s=machine.suffix / 1e3, answers=answers)
    head = Recorded("eagle", lambda place: 0.0, answers=answers, is_free=False, acceptance=ACCEPTANCE)
    head.query_s, head.node_s, head.missing_s = machine.head / 1e3, machine.node / 1e3, 4e-7 * machine.step
    deciding_s = 0.0 if fixed else machine.deciding / 1e3
    world = World(machine.calibration, [suffix, head], noise=0.2, hiccup_every=97, fixed=fixed, deciding_s=deciding_s)
    world.random = random.Random(seed)
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for request, answer in enumerate(answers):
        params, before = SamplingParams().resolved({}), (world.plain, world.elapsed)
        known = list(range(answer.prompt + 1))
        text = Sequence(request, "", 0, known, answer.prompt, params, 0, len(answer.tokens))
        while text.num_output_tokens < len(answer.tokens):
            world.step([text])
        world.controller.release([text.id])
        kinds[answer.kind][0] += world.plain - before[0]
        kinds[answer.kind][1] += world.elapsed - before[1]
    return world.speedup, min(plain / spent for plain, spent in kinds.values())


def record(arguments: argparse.Namespace) -> None:
    llm = LLM(arguments.model, dtype=arguments.dtype, spec="off", prefix_caching=False, max_num_seqs=1)
    speculation, params = llm.engine.speculation, SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    propose, answers = speculation.propose, list[Answer]()
    made: dict[str, Any] = {}

    def recorded(works: list[Work]) -> list[Work]:
        """Ask all proposers, and verify nothing."""
        for work in propose(works):
            by_origin: dict[str, tuple[list[int], ...]] = {}
            for draft in speculation._step.made.get(0, {}).values():  # type: ignore[union-attr]
                by_origin[draft.origin[0]] = list(draft.tokens), list(draft.parents), list(draft.scores)  # type: ignore[assignment]
            made[str(work.sequence.num_tokens)] = by_origin
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
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", "--drafts", dest="out", default="drafts.json")
    arguments = parser.parse_args()
    if arguments.action == "record":
        record(arguments)
        return
    answers = [Answer(*answer) for answer in json.loads(Path(arguments.out).read_text())]
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
