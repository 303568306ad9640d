"""Generated texts that show how a tokenizer cuts: digits, spaces, code, emoji, mixed scripts, control tokens.

The same seed gives the same texts on every machine: only `Random.random` is used, whose sequence Python promises.
Characters that Unicode assigned lately are avoided, because libraries disagree about them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

NUM_TEXTS = 2000
SEED = 12

_SPACES = [*" \t\n\x0b\u00a0\u2003\u2028\u3000", "  ", "   ", "    ", "\n\n", "\r\n", " \n", "\n "]
_NUMBERS = [*"½²Ⅷ٣४๗五１①𝟗"]
_PUNCTUATION = [*"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~—…“”¿«。，、€→≠"]
_ENGLISH = "the The tea Water it's they'll WE'RE I'd don't A HTTPServer naïve Ünïcode isn’t x y can't O'Neil".split()
_SCRIPTS = [
    _ENGLISH,
    "Straße Größe ÉCOLE œuvre İstanbul".split(),
    "Привет мир ЁЖ Україна".split(),
    "Καλημέρα ΚΌΣΜΕ ἀρχή".split(),
    "こんにちは 世界 カタカナ 漢字 你好 我们".split(),
    "안녕하세요 세계".split(),
    "مرحبا بالعالم السَّلام".split(),
    "שלום עולם".split(),
    "नमस्ते दुनिया বাংলা தமிழ்".split(),
    "สวัสดี ชาวโลก".split(),
    "Tiếng Việt e\u0301 n\u0303o ǆ ﬁ ª".split(),
]
_EMOJI = [*"🙂🌍☃\u200d\u200b\ufeff\ue000\x00\x1c", "👍🏽", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "❤️", "1️⃣"]
CONTROL_SPELLINGS = (
    "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <s> <unk> <|end|> <|user|> <|im_".split()
)
_CODE = [
    "def f(x):\n    return x  # 1st\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}\n",
    "\nif x == 3:\n        print(x)\n\n\n",
    '{"key": [1, 2.5, -3e10], "b": null}',
    "SELECT * FROM t WHERE id>=100;\r\n",
    "<div class='a-b'>&nbsp;</div>",
    "let s = `${x}`;  // it's\n",
    "import numpy as np\n\n\n\nx=np.zeros((3,4))",
    "| a | b |\n|---|---|\n| 1 | 22 |\n",
    "1. One\n\n2. Two\n\n10. Ten",
    "snake_case_name camelCaseName __init__ 0xFF 1_000",
    "#include <stdio.h>\n",
    "///**/ /\n/ path/to/file.txt",
]


class _Choices:
    """Draws from `Random.random` alone."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def number(self, low: int, high: int) -> int:
        """One of low, ..., high."""
        return low + int(self._random.random() * (high - low + 1))

    def one(self, items: Sequence[str]) -> str:
        return items[self.number(0, len(items) - 1)]


def generated_texts(num_texts: int = NUM_TEXTS, seed: int = SEED) -> list[str]:
    """Different texts, of six kinds in turn; the sixth mixes the others."""
    choices = _Choices(seed)
    kinds: list[Callable[[_Choices], str]] = [_digits, _spaces, _code, _emoji, _scripts, _mixed]
    texts: dict[str, None] = {}
    while len(texts) < num_texts:
        for kind in kinds:
            texts[kind(choices)] = None
    return list(texts)[:num_texts]


def sentencepiece_texts() -> list[str]:
    """The generated texts, and some with the token that ends documents inside."""
    texts = generated_texts()
    return texts + [f"{left}</s>{right}" for left, right in zip(texts[:400:2], texts[1:400:2], strict=True)]


def turns_of(spec_bench: Path) -> list[str]:
    """All user turns of a file in Spec-Bench's format."""
    lines = spec_bench.read_text(encoding="utf-8").splitlines()
    return [turn for line in lines for turn in json.loads(line)["turns"]]


def _maybe(choices: _Choices, items: Sequence[str]) -> str:
    return choices.one(items) if choices.number(0, 1) else ""


def _digits(choices: _Choices) -> str:
    parts = []
    for _ in range(choices.number(1, 8)):
        run = "".join(choices.one("0123456789") for _ in range(choices.number(1, 9)))
        other = choices.one(_NUMBERS) if choices.number(0, 4) == 0 else ""
        parts.append(_maybe(choices, [*_SPACES, *_PUNCTUATION, *_ENGLISH]) + run + other)
    return "".join(parts)


def _spaces(choices: _Choices) -> str:
    parts = []
    for _ in range(choices.number(1, 8)):
        spaces = "".join(choices.one(_SPACES) for _ in range(choices.number(1, 4)))
        parts.append(spaces + _maybe(choices, [*_ENGLISH, *_PUNCTUATION, "7", "42"]))
    return "".join(parts)


def _code(choices: _Choices) -> str:
    return "".join(choices.one(_CODE) + _maybe(choices, _SPACES) for _ in range(choices.number(1, 3)))


def _emoji(choices: _Choices) -> str:
    parts = [choices.one(_EMOJI) + _maybe(choices, [*_SPACES, *_ENGLISH, *_PUNCTUATION]) for _ in range(6)]
    return "".join(parts[: choices.number(1, 6)])


def _scripts(choices: _Choices) -> str:
    parts = []
    for _ in range(choices.number(1, 8)):
        words = _SCRIPTS[choices.number(0, len(_SCRIPTS) - 1)]
        parts.append(choices.one(words) + _maybe(choices, [" ", " ", " ", *_SPACES, *_PUNCTUATION, *_NUMBERS]))
    return "".join(parts)


def _mixed(choices: _Choices) -> str:
    kinds = [_digits, _spaces, _code, _emoji, _scripts]
    return "".join(kinds[choices.number(0, 4)](choices) + _maybe(choices, CONTROL_SPELLINGS) for _ in range(3))
