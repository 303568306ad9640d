"""Control tokens spelled out in a conversation stay text: only the chat template writes control tokens.

Before the template runs, the first character of every such spelling is exchanged for a stand-in, a private-use
character that neither the conversation nor the template contains. The tokenizer then finds only the template's control
tokens. Afterwards, in its normalizer, it puts the characters back, so that words and merges are those of plain text.

All strings of a conversation are content: also roles, names, and tool calls with their arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidPrompt

if TYPE_CHECKING:
    import tokenizers

StandIns = dict[str, str]  # the first character of control tokens -> what stands in for it

_PRIVATE_USE = range(0xE000, 0xF900)
_CONTROL_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def looks_like_control(token: str) -> bool:
    """Whether a token is spelled like <|this|>. Some files do not mark all their control tokens."""
    return _CONTROL_SHAPE.fullmatch(token) is not None


class ContentEscape:
    """Exchanges and restores the characters for one set of control tokens and one template."""

    def __init__(self, control_tokens: Iterable[str], template: str) -> None:
        self._control = frozenset(filter(None, control_tokens))
        longest_first = sorted(self._control, key=lambda token: (-len(token), token))
        self._spelling = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._first_characters = sorted({token[0] for token in self._control})
        self._template = template

    def escape(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], StandIns]:
        """The messages without any control token, and what stands in; raises InvalidPrompt for what JSON has not."""
        try:
            everything = json.dumps(messages, ensure_ascii=False) + self._template
            used = set(everything)
            unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
            free = (character for character in unused if _written(character) not in everything)
            stand_ins = dict(zip(self._first_characters, free))
            if len(stand_ins) == len(self._first_characters):
                return self._escape(messages, stand_ins), stand_ins
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidPrompt(
                f"Messages must consist of strings, numbers, booleans, None, lists and dicts, as in JSON ({error})."
            ) from error
        raise InvalidPrompt(
            f"The conversation uses nearly all {len(_PRIVATE_USE)} private-use characters from U+E000 to U+F8FF, but "
            f"{len(self._first_characters)} must be free to mark control tokens; leave some out."
        )

    def tokenizer(self, backend: tokenizers.Tokenizer, stand_ins: StandIns) -> tokenizers.Tokenizer:
        """A tokenizer over the same model that looks for control tokens first and restores characters afterwards."""
        from tokenizers import AddedToken, Tokenizer, normalizers

        steps: list[Any] = []
        for character, stand_in in stand_ins.items():
            steps += [normalizers.Replace(stand_in, character), normalizers.Replace(_written(stand_in), character)]
        if backend.normalizer is not None:
            steps.append(backend.normalizer)
        tokenizer = Tokenizer(backend.model)
        tokenizer.normalizer = normalizers.Sequence(steps)
        if backend.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        for token in map(added.__getitem__, sorted(added)):  # in this order they get the same ids
            if token.content in self._control:
                flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
                # normalized=False: not looked for in what the normalizer restores
                token = AddedToken(token.content, normalized=False, special=token.special, **flags)
            tokenizer.add_tokens([token])
        return tokenizer

    def _escape(self, value: Any, stand_ins: StandIns) -> Any:
        if isinstance(value, str):
            while self._spelling.search(value):  # again, because spellings may overlap
                value = self._spelling.sub(lambda found: stand_ins[found[0][0]] + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self._escape(key, stand_ins): self._escape(item, stand_ins) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(item, stand_ins) for item in value]
        return value


def unescape(text: str, stand_ins: StandIns) -> str:
    """The text with the characters back in their places."""
    for character, stand_in in stand_ins.items():
        text = text.replace(stand_in, character).replace(_written(stand_in), character)
    return text


def _written(stand_in: str) -> str:
    """The form that a stand-in takes when a template prints a list or a dict, or writes ASCII-only JSON."""
    return f"\\u{ord(stand_in):04x}"
