"""Fill-in-the-middle: the tokens by which models of code are told what stands before a gap and behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|end_of_text|>")  # by which a filling may end, besides EOS


@dataclass(frozen=True)
class FillInTokens:
    """`prefix` TEXT `suffix` TEXT `middle`, and then the model writes what lies between. Other files come first, each
    behind `file`, where the model knows that token."""

    prefix: str
    suffix: str
    middle: str
    repository: str | None = None
    file: str | None = None
    end_ids: tuple[int, ...] = ()  # with which a filling is over: the model goes on to another file or gap

    def prompt(self, before: str, behind: str, files: Sequence[tuple[str, str]] = (), begun: str = "") -> str:
        """`files` are names and texts of others that the one with the gap may refer to. `begun` begins the filling."""
        text = f"{self.prefix}{before}{self.suffix}{behind}{self.middle}{begun}"
        if not files:
            return text
        if self.file is None:
            return "".join(f"{name}\n{content}\n" for name, content in files) + text
        others = "".join(f"{self.file}{name}\n{content}" for name, content in files)
        return f"{self.repository or ''}project\n{others}{self.file}file\n{text}"


_KNOWN = (
    FillInTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen Coder
    FillInTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),  # StarCoder, Granite
    FillInTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    FillInTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def fill_in_tokens(vocabulary: Mapping[str, int]) -> FillInTokens | None:
    """Those that a model has, as far as it has them."""
    for known in _KNOWN:
        if all(name in vocabulary for name in (known.prefix, known.suffix, known.middle)):
            has_files = known.file in vocabulary and known.repository in vocabulary
            found = known if has_files else replace(known, repository=None, file=None)
            names = {found.prefix, found.suffix, found.middle, found.repository, found.file, *_ENDS}
            return replace(found, end_ids=tuple(sorted(vocabulary[name] for name in names & vocabulary.keys() if name)))
    return None
