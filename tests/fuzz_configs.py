"""A fuzz over the configs of heads: a mutated one gives a head that drafts, or one sentence.

    python -m tests.fuzz_configs --count 2000

Random heads in every layout that is served, and those that training writes, have one or two places of their config.json
changed, or of the metadata of their GGUF file. Each is opened with the model that it was made for. Any other exception
than an InvalidModel with a sentence is a failure. Of those that are opened, every config that differs from the others
also drafts, and the text must be that of plain decoding. Mutation `i` depends on the seed and `i` alone, so `--seed S
--first i --count 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from foredraft.errors import InvalidModel
from foredraft.heads.formats import open_head
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape
from tests.tiny_heads import save_heads
from tests.tiny_models import VOCAB, random_model, save_model

VALUES: list[Any] = [None, 0, 1, -1, 3, 2**40, 1e308, True, False, "", "yarn", [], {}, [1], ["a"], [-5, 99], {"a": 1}]
PROMPT = [(5 * place * place + 3) % VOCAB for place in range(20)]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a config."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*place, key)
        yield from places(part, (*place, key))


def mutate_json(file: Path, chance: random.Random) -> None:
    config = json.loads(file.read_text())
    for _ in range(chance.choice([1, 1, 2])):
        *way, last = chance.choice(list(places(config)))
        part = config
        for key in way:
            part = part[key]
        old = part[last]
        match chance.randrange(4):
            case 0:
                del part[last]
            case 1 if isinstance(old, int | float):
                part[last] = chance.choice([old + 1, old - 1, old * 2, old // 2, -old, old * 10**9, str(old)])
            case 2 if isinstance(old, list) and old:
                part[last] = chance.choice([old[:-1], old + old, old[::-1], [old]])
            case _:
                part[last] = chance.choice(VALUES)
    file.write_text(json.dumps(config))


def mutate_gguf(file: Path, chance: random.Random) -> None:
    """Change the bytes of one or two values of its metadata; their types and lengths stay."""
    data = bytearray(file.read_bytes())
    fields = [field for field in GGUFReader(file).fields.values() if field.data and field.offset]
    for _ in range(chance.choice([1, 1, 2])):
        field = chance.choice(fields)
        part = chance.choice(field.data)
        start = field.offset + sum(each.nbytes for each in field.parts[:part])
        for place in range(start, start + field.parts[part].nbytes):
            if chance.random() < 0.6:
                data[place] = chance.choice([0, 1, 2, 3, 255, chance.randrange(256)])
    file.write_bytes(data)


class Fuzz:
    """A model, heads in every layout that fit it, and the configs that were seen so far."""

    def __init__(self, folder: Path) -> None:
        model = random_model("llama", num_hidden_layers=8)
        self.model, self._changed = save_model(model, folder / "model"), folder / "changed"
        shape = TargetShape(hidden=model.config.hidden_size, vocab=VOCAB)
        self.target = open_checkpoint(self.model)
        self.heads: list[Path] = []
        for name, layout in sorted(LAYOUTS.items()):
            place = folder / name
            layout.write(place, shape, 7)
            try:
                self.open(place)
                self.heads.append(place)
            except InvalidModel:  # one that is not served, which other tests look at
                continue
        self.heads += sorted(save_heads(self.model, folder / "own").iterdir())
        self._plain = LLM(str(self.model), spec="off", head=None).generate([PROMPT], PARAMS)[0].token_ids
        self._seen: set[str] = set()

    def open(self, place: Path) -> Any:
        return open_head(next(place.glob("*.gguf"), place), self.target)

    def judge(self, seed: int, index: int, drafts: bool = True) -> tuple[str, str]:
        """What came of a mutation: "loaded", "drafted", "refused" with the sentence, or "failed" with the reason."""
        chance = random.Random(f"{seed} {index}")
        place = self.heads[index % len(self.heads)]
        shutil.rmtree(self._changed, ignore_errors=True)
        shutil.copytree(place, self._changed)
        file = next(self._changed.glob("*.gguf"), None)
        if file is None:
            mutate_json(self._changed / "config.json", chance)
        else:
            mutate_gguf(file, chance)
        try:
            head = self.open(self._changed)
            if drafts and repr(head.config) not in self._seen:
                self._seen.add(repr(head.config))
                return "drafted", self._draft(head.config.kind)
        except InvalidModel as error:
            sentence = str(error)
            is_sentence = sentence.endswith(".") and "\n" not in sentence and len(sentence) < 1000
            return ("refused" if is_sentence else "failed"), f"{place.parent.name}/{place.name}: {sentence}"
        except BaseException:
            return "failed", f"{place.parent.name}/{place.name}: {traceback.format_exc()[-1500:]}"
        return "loaded", ""

    def _draft(self, kind: str) -> str:
        given = str(next(self._changed.glob("*.gguf"), self._changed))
        llm = LLM(str(self.model), head=given, spec="off")
        try:
            (output,) = llm.generate([PROMPT], PARAMS, spec=kind)
        finally:
            llm.close()
        assert output.token_ids == self._plain and output.error is None
        return kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    outcomes, started = Counter[str](), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        for index in range(options.first, options.first + options.count):
            outcome, detail = fuzz.judge(options.seed, index)
            outcomes[outcome] += 1
            if outcome == "failed":
                print(f"seed {options.seed}, mutation {index}: {detail}", flush=True)
    shown = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    print(f"{len(fuzz.heads)} layouts, {shown} in {time.perf_counter() - started:.0f} s")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
