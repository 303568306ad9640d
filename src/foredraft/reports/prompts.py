"""Files of prompts, one JSON object a line: questions of an evaluation in Spec-Bench's format, texts, conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.errors import InvalidPrompt

if TYPE_CHECKING:
    from foredraft.llm import LLM

Message = dict[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | list[Message]  # a text to continue, or a conversation to answer
T = TypeVar("T")


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


def read_suite(file: Path) -> list[Question]:
    """The questions of a file; of several turns the first."""

    def parse(record: Any) -> Question | None:
        match record:
            case {"category": str(category), "turns": [str(text), *_]} if text:
                return Question(category, text)
        return None

    return _read(file, "question", '{"question_id": 1, "category": "...", "turns": ["..."]}', parse)


def read_prompts(file: Path) -> list[Prompt]:
    """Texts and conversations; of several turns the first."""

    def parse(record: Any) -> Prompt | None:
        match record:
            case {"messages": [*messages]} if messages and all(isinstance(message, dict) for message in messages):
                return messages
            case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]}:
                return prompt
        return None

    return _read(file, "prompt", '{"prompt": "..."}, {"messages": [...]} or {"turns": ["..."]}', parse)


def read_turns(file: Path) -> list[list[str]]:
    """What the user says, turn by turn, at least once."""

    def parse(record: Any) -> list[str] | None:
        match record:
            case {"turns": [str(first), *others]} if first and all(isinstance(turn, str) for turn in others):
                return [first, *others]
            case {"prompt": str(prompt)} if prompt:
                return [prompt]
        return None

    return _read(file, "prompt", '{"turns": ["..."]} or {"prompt": "..."}', parse)


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


def _read(file: Path, what: str, allowed: str, parse: Callable[[Any], T | None]) -> list[T]:
    """What `parse` makes of every line, at least one. A line of which it makes None is named by its number."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: a JSON string may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidPrompt(f"{file} cannot be read: {reason}.") from error
    found: list[T] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = parse(json.loads(line))
        except json.JSONDecodeError as error:
            problem = f"{error.msg} at column {error.colno}"
            raise InvalidPrompt(f"{file}:{number} is not JSON ({problem}); use {allowed}.") from error
        if parsed is None:
            raise InvalidPrompt(f"{file}:{number} holds no {what}; use {allowed}.")
        found.append(parsed)
    if not found:
        raise InvalidPrompt(f"{file} holds no prompts; write one JSON object a line: {allowed}.")
    return found
