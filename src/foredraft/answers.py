"""Answers: what of a model's text is thought, what is said, and what is called, whole or in pieces.

Three kinds of text are read. Qwen, DeepSeek and SmolLM put a thought in front, in `<think>…</think>`; their prompts may
have begun it. Calls are `<tool_call>` elements there, or, with Llama 3, an answer that is nothing but one JSON object.
gpt-oss writes messages, each behind a header with a channel (Harmony):

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>what is said
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from foredraft.tool_calls import ToolCall, parse_calls

THINK, END_OF_THOUGHT = "<think>", "</think>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
TAGS = (THINK, END_OF_THOUGHT, CALL, END_OF_CALL)
HARMONY_TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)

_LLAMA3_ASKS_FOR = '"parameters": dictionary of argument name and its value'  # the templates of Llama 3.1 to 3.3
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


@dataclass
class Part:
    """What of an answer has become clear."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, more: Part) -> Part:
        return Part(self.reasoning + more.reasoning, self.content + more.content, self.calls + more.calls)


class AnswerReader(ABC):
    """Separates an answer while it comes in pieces; how it is cut into pieces changes nothing. What may be the
    beginning of a tag is held back until it is clear."""

    def __init__(self) -> None:
        self._held = ""
        self._part = Part()  # since the last piece

    def feed(self, text: str) -> Part:
        """What is clear with this text and was not before."""
        self._held += text
        self._read()
        return self._taken()

    def end(self) -> Part:
        """What was held back, now that nothing more comes."""
        self._finish()
        self._held = ""
        return self._taken()

    def whole(self, text: str) -> Part:
        """A complete answer."""
        return self.feed(text) + self.end()

    @abstractmethod
    def _read(self) -> None:
        """Move what is clear from the held text into the part."""

    @abstractmethod
    def _finish(self) -> None:
        """Move all of it."""

    def _taken(self) -> Part:
        part, self._part = self._part, Part()
        return part

    def _upto(self, tags: Collection[str]) -> tuple[str, str]:
        """Take the held text before the first of these tags, and the tag; while there is none, what cannot be the
        beginning of one, and ""."""
        held = self._held
        found = [(place, tag) for tag in tags if (place := held.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            self._held = held[place + len(tag) :]
            return held[:place], tag
        place = len(held) - max(_overlap(held, tag) for tag in tags)
        self._held = held[place:]
        return held[:place], ""


class TagReader(AnswerReader):
    """Reads `<think>` in front, `<tool_call>` behind it, and calls without a tag. `names` are the tools that may be
    called: None is any, and where there is none, calls are content."""

    def __init__(
        self, thinks: bool = False, has_bare_calls: bool = False, names: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self._names = names
        self._finds_calls = names is None or bool(names)
        self._may_think = thinks
        self._finds_bare_calls = has_bare_calls and self._finds_calls
        self._has_thought = False  # something that is not a space
        self._is_behind_thought = False
        self._state: Callable[[], bool]  # reads on; False: more text is needed
        self._state = self._front if thinks or self._finds_bare_calls else self._content

    def _read(self) -> None:
        while self._state():
            pass

    def _front(self) -> bool:
        """Where a thought or a bare call may begin. Spaces in front of content stay, except behind a thought."""
        text = self._held.lstrip()
        if self._may_think and text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._state = self._thought
        elif not text or (self._may_think and THINK.startswith(text)):
            return False
        elif self._finds_bare_calls and text.startswith("{"):
            self._state = self._object
        else:
            self._held = text if self._is_behind_thought else self._held
            self._state = self._content
        return True

    def _thought(self) -> bool:
        text, tag = self._upto((END_OF_THOUGHT,))
        thought = text if self._has_thought else text.lstrip()
        kept = thought.rstrip()
        self._part.reasoning += kept
        self._has_thought = self._has_thought or bool(kept)
        if not tag:
            self._held = thought[len(kept) :] + self._held  # spaces at the end of a thought are no part of it
            return False
        self._may_think, self._is_behind_thought = False, True
        self._state = self._front
        return True

    def _content(self) -> bool:
        if not self._finds_calls:
            self._part.content += self._held
            self._held = ""
            return False
        text, tag = self._upto((CALL,))
        self._part.content += text
        if tag:
            self._state = self._call
        return bool(tag)

    def _call(self) -> bool:
        text, found, rest = self._held.partition(END_OF_CALL)
        if not found:
            return False
        calls = parse_calls(text)
        if calls is None:
            self._part.content += f"{CALL}{text}{END_OF_CALL}"
        self._part.calls += calls or ()
        self._held = rest
        self._state = self._content
        return True

    def _object(self) -> bool:
        """An answer that may be a bare call: only its end tells."""
        return False

    def _finish(self) -> None:
        held = self._held
        if self._state == self._thought:
            self._part.reasoning += held.rstrip()
        elif self._state == self._object:
            call = _bare_call(held, self._names)
            if call is None:
                self._part.content += held.lstrip() if self._is_behind_thought else held
            else:
                self._part.calls.append(call)
        elif self._state == self._call:
            calls = parse_calls(held)
            self._part.calls += calls or ()
            self._part.content += "" if calls else CALL + held
        else:
            self._part.content += held.lstrip() if self._is_behind_thought and self._state == self._front else held


class HarmonyReader(AnswerReader):
    """Reads messages by their headers: the channel `analysis` is thought, a message to a function is a call, and all
    others are content. A blank line stands between messages of one kind. `begun` is the prompt's last message, which
    the answer goes on with: usually a header."""

    def __init__(self, begun: str = "", names: Collection[str] | None = None) -> None:
        super().__init__()
        self._finds_calls = names is None or bool(names)
        self._in_header = False
        self._is_thought = False
        self._called: str | None = None  # the function that the message is for
        self._arguments = ""
        self._has_header = False
        self._spoken: set[bool] = set()  # kinds that have a text: whether it is thought
        self._is_apart = False  # whether a blank line comes before the text
        self.feed(begun)
        self._spoken.clear()
        self._arguments = ""

    def _read(self) -> None:
        while self._header() if self._in_header else self._body():
            pass

    def _header(self) -> bool:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return False
        function = _FUNCTION.search(header)
        self._called = function[1] if function and self._finds_calls else None
        self._is_thought = f"{CHANNEL}analysis" in header
        self._is_apart = self._is_thought in self._spoken
        self._held, self._in_header, self._has_header = rest, False, True
        return True

    def _body(self) -> bool:
        text, tag = self._upto((*_ENDS, START, CHANNEL))
        self._say(text)
        if not tag:
            return False
        self._close()
        self._held = CHANNEL + self._held if tag == CHANNEL else self._held
        self._in_header = True
        return True

    def _say(self, text: str) -> None:
        if self._called is not None:
            self._arguments += text
        elif text:
            text = f"\n\n{text}" if self._is_apart else text
            self._is_apart = False
            self._spoken.add(self._is_thought)
            self._part.reasoning += text if self._is_thought else ""
            self._part.content += "" if self._is_thought else text

    def _close(self) -> None:
        if self._called is not None:
            self._part.calls.append(ToolCall(self._called, self._arguments.strip()))
        self._called, self._arguments = None, ""

    def _finish(self) -> None:
        """A header that was cut says nothing, and an answer without any header is content."""
        if not self._in_header:
            self._say(self._held)
            self._close()
        elif not self._has_header and CHANNEL not in self._held:
            self._part.content += self._held.removeprefix("assistant")


class CallReader(AnswerReader):
    """Of an answer that a grammar makes one call: of the tool `called`, whose arguments it is, or of the one that it
    names."""

    def __init__(self, called: str | None = None) -> None:
        super().__init__()
        self._called = called

    def _read(self) -> None:
        pass  # only the end tells

    def _finish(self) -> None:
        if self._called is not None:
            self._part.calls.append(ToolCall(self._called, self._held))
            return
        calls = parse_calls(self._held)
        self._part.calls += calls or ()
        self._part.content += "" if calls else self._held


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers. `begun` is what of the answer stands at the end of the prompt."""

    thinks: bool = False
    has_bare_calls: bool = False
    is_harmony: bool = False
    begun: str = ""

    @classmethod
    def of(cls, template: str, marked: Collection[str]) -> AnswerFormat:
        """As a chat template and the tokens that are matched whole in any text show it."""
        return cls(
            thinks=END_OF_THOUGHT in template or THINK in marked,
            has_bare_calls=_LLAMA3_ASKS_FOR in template and CALL not in template,
            is_harmony=all(tag in marked for tag in (START, CHANNEL, MESSAGE)),
        )

    @property
    def may_reason(self) -> bool:
        """Whether an answer may begin with something that is not said."""
        return self.thinks or self.is_harmony

    def reader(self, names: Collection[str] | None = None) -> AnswerReader:
        """`names` are the tools that may be called: None is any."""
        if self.is_harmony:
            return HarmonyReader(self.begun, names)
        reader = TagReader(self.thinks, self.has_bare_calls, names)
        reader.feed(self.begun)
        return reader


def _bare_call(text: str, names: Collection[str] | None) -> ToolCall | None:
    """The call that this JSON object is, as Llama 3 writes it; None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {"name", "parameters"}:
        return None
    name, arguments = found["name"], found["parameters"]
    if not isinstance(name, str) or not isinstance(arguments, dict) or (names is not None and name not in names):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of the text may be the beginning of the tag."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
