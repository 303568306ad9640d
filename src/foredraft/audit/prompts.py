"""The prompts of an audit: a few of different kinds that come with it, or a file in Spec-Bench's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.audit.json_lines import read_json_lines
from foredraft.errors import InvalidPrompt

if TYPE_CHECKING:
    from foredraft.llm import LLM

ALLOWED = '{"question_id": 1, "category": "...", "turns": ["..."]}'


@dataclass(frozen=True)
class Question:
    """A user's request, and the kind of text that it asks for."""

    category: str
    text: str

    def encoded(self, llm: LLM) -> list[int]:
        """The text as a user's turn, or as it is for a model that has no chat template."""
        try:
            return llm.encode([{"role": "user", "content": self.text}])
        except InvalidPrompt:
            return llm.encode(self.text)


BUILT_IN = (
    Question("explanation", "Explain to a child why the moon changes its shape over a month."),
    Question("code", "Write a Python class Stack with push, pop, peek and __len__, then a test for each method."),
    Question(
        "editing",
        "Repeat this list with every price doubled and nothing else changed:\n"
        "apples: 2 dollars\npears: 3 dollars\nplums: 5 dollars\ncherries: 8 dollars\nfigs: 6 dollars",
    ),
    Question(
        "mathematics", "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show the steps."
    ),
    Question("data", 'Write ten JSON objects, one a line, with the fields "id", "name" and "city".'),
    Question("translation", "Translate into German, then into French: The library opens at ten and closes at six."),
    Question(
        "summary",
        "Summarise in one sentence: The harbour was built in 1850 for wooden ships. When iron ships came they were too "
        "deep for it, so the town dug a second basin. Today the old harbour holds boats, and the new one holds cranes.",
    ),
    Question(
        "story", "Write the beginning of a story about a lighthouse keeper who receives a letter without a stamp."
    ),
)


def read_suite(file: Path) -> list[Question]:
    """The questions of a file, one JSON object a line; of several turns the first. A bad line is named by its
    number."""
    return [_question(record, where) for where, record in read_json_lines(file, ALLOWED)]


def spread(questions: Sequence[Question], limit: int) -> list[Question]:
    """At most `limit` questions, as many of each category as of any other; what does not go round skips evenly."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    chosen: list[Question] = []
    for row in zip_longest(*by_category.values()):
        one_each = [question for question in row if question is not None]
        room = min(limit - len(chosen), len(one_each))
        chosen += [one_each[place * len(one_each) // room] for place in range(room)]
    return chosen


def _question(record: Any, where: str) -> Question:
    match record:
        case {"category": str(category), "turns": [str(text), *_]} if text:
            return Question(category, text)
    raise InvalidPrompt(f"{where} holds no question; use {ALLOWED}.")
