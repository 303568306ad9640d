"""Grammars: what a request allows its output to be, as a mask over the vocabulary at every node of a draft.

The parser is llguidance. It follows tokens and rolls them back, so one parser per sequence visits a whole draft tree.
Its masks are a function of the tokens alone, whatever it visited before. Where the grammar leaves one text only, the
mask holds the one token with which the tokenizer would write it: such tokens are forced.

Compiling and every step of the parser have limits, counted in states and not in seconds, so that the same request gets
the same answer on every machine.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import InvalidParameter

if TYPE_CHECKING:
    import llguidance

_MOST_CACHED = 32  # compiled grammars
_MOST_FORCED = 2048  # tokens, one after the other
_MOST_SHOWN = 200  # characters of what the parser says is wrong

# A compilation takes at most about a second, and a step of the parser some milliseconds. A full automaton takes 15 MB.
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_items_in_row": 500,
    "max_lexer_states": 30_000,
    "max_grammar_size": 100_000,
}
# JSON as json.dumps writes it. Free white space would let a model write nothing else, and leave few tokens forced.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": False,
}


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the compiled ones by their content. Any thread may compile."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size  # of the target's logits
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()  # the one that was used last comes last

    def compile(self, grammar: Mapping[str, Any]) -> CompiledGrammar:
        """Raises InvalidParameter for a grammar that cannot be used. Takes milliseconds, at worst about a second."""
        text = json.dumps(grammar)
        with self._lock:
            compiled = self._compiled.get(text)
            if compiled is not None and not compiled.is_full:
                self._compiled.move_to_end(text)
                return compiled
            tokenizer = self._tokenizer  # takes half a second when it is first used
        compiled = CompiledGrammar(_source(grammar), tokenizer, self._vocab_size, self._eos_token_ids)
        with self._lock:
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            if len(self._compiled) > _MOST_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        library = _library()
        try:
            tokenizer: llguidance.LLTokenizer = library.LLTokenizer(
                self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
            )
        except ValueError as error:
            raise InvalidParameter(
                f"grammar cannot be used with this model, because its tokenizer is of an unknown kind: {error}."
            ) from error
        return tokenizer


class CompiledGrammar:
    """A grammar that any number of sequences follow, each with a constraint of its own."""

    def __init__(
        self, source: str, tokenizer: llguidance.LLTokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._start = self._built()
        self.is_full = False  # whether its automaton has reached its limit
        first = self._start.deep_copy()
        first.compute_bitmask()  # finds grammars that nothing fits
        num_forced = len(first.compute_ff_tokens())  # and those that begin and never end
        if first.is_error():
            raise InvalidParameter(_complaint(first))
        if num_forced > _MOST_FORCED:
            raise InvalidParameter(
                f"grammar cannot be used: it forces more than {_MOST_FORCED} tokens at its beginning, so it may have "
                "no end; give a recursive rule an alternative."
            )

    def constraint(self, ignore_eos: bool = False) -> GrammarConstraint:
        return GrammarConstraint(self, ignore_eos)

    def matcher(self) -> llguidance.LLMatcher:
        """A parser at the beginning. All of them share one automaton, which grows while they are used."""
        return self._start.deep_copy()

    def fresh_matcher(self) -> llguidance.LLMatcher:
        """A parser that shares nothing, for a sequence that found the automaton full. Later requests compile again."""
        self.is_full = True
        return self._built()

    def _built(self) -> llguidance.LLMatcher:
        library = _library()
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        matcher: llguidance.LLMatcher = library.LLMatcher(self._tokenizer, self._source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidParameter(_complaint(matcher))
        return matcher


class GrammarConstraint:
    """What one sequence may write next. A path is the tokens behind those that were accepted.

    The parser stands wherever the last call left it. A call moves it along the tree: back to the last common token,
    then down the new path. No call raises: a parser that exceeds a limit allows nothing more, and `error` says why.
    """

    def __init__(self, grammar: CompiledGrammar, ignore_eos: bool) -> None:
        self._grammar = grammar
        self._ignore_eos = ignore_eos
        self._matcher: llguidance.LLMatcher | None = None  # made when it is first needed
        self._is_fresh = False  # whether the parser shares nothing with those of other sequences
        self._tokens: list[int] = []  # that the parser has consumed: the accepted ones, then a path
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by path, since the last accepted tokens
        self.num_accepted = 0
        self.error: str | None = None

    def mask(self, path: Items[int]) -> Tensor:
        """Which tokens may follow a path: bool [vocab]. After the end of the grammar only end-of-text tokens may, so
        that there is always one. Those are allowed wherever the grammar may end, unless the request ignores them and
        there are others."""
        key = tuple(path)
        known = self._masks.get(key)
        if known is None:
            known = self._masks[key] = self._computed_mask(path)
        return known

    def accept(self, tokens: Items[int]) -> None:
        """Tokens were committed. The sequence ends with an end-of-text token, so that one is not followed."""
        reached = self._follow(tokens, is_drawn=True)
        if reached < len(self._before_end(tokens)):
            self.error = self.error or "The grammar does not allow a token that was drawn."
        self.num_accepted += reached
        self._masks.clear()

    def num_valid(self, path: Items[int]) -> int:
        """How many leading tokens of a path the grammar allows."""
        kept = self._before_end(path)
        length = self._follow(kept)
        if length == len(kept) < len(path) and self._now(lambda matcher: matcher.is_accepting(), False):
            return length + 1  # an end-of-text token where the grammar may end
        return length

    def forced(self, path: Items[int]) -> list[int]:
        """The tokens that must follow a path, because the mask has no other one; often none."""
        if self._follow(path) < len(path):
            return []
        tokens: list[int] = self._now(lambda matcher: matcher.compute_ff_tokens(), [])
        return tokens

    def is_complete(self, path: Items[int]) -> bool:
        """Whether a path ends the grammar: nothing more may be written."""
        reached = self._follow(path, is_drawn=True)
        return reached == len(path) and self._now(lambda matcher: matcher.is_stopped(), False)

    def _computed_mask(self, path: Items[int]) -> Tensor:
        vocab = self._grammar.vocab_size
        ends = sorted(self._grammar.eos_token_ids)
        if self._follow(path, is_drawn=True) == len(path):
            bits = self._now(lambda matcher: matcher.compute_bitmask(), b"")
            unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab]
            mask = torch.from_numpy(unpacked.view(np.bool_))
            if self._ignore_eos and self.error is None:
                mask[ends] = False
            if mask.any():
                return mask
        mask = torch.zeros(vocab, dtype=torch.bool)  # behind the end, or behind a token that is not allowed
        mask[ends] = self.error is None
        return mask

    def _before_end(self, path: Items[int]) -> Items[int]:
        """The tokens before the first end-of-text token."""
        end = next((place for place, token in enumerate(path) if token in self._grammar.eos_token_ids), len(path))
        return path[:end]

    def _follow(self, path: Items[int], is_drawn: bool = False) -> int:
        """Move the parser along a path as far as the grammar allows; returns how many of its tokens that are.

        A parser whose automaton is full refuses tokens without a word, and gives the error with its next mask. So a
        path that was drawn under masks, which must be allowed, is tried again after one, at first by the shared parser
        and then by the sequence's own.
        """
        before_end = self._before_end(path)
        reached: int = self._now(lambda matcher: self._move(matcher, before_end), 0)
        for _ in range(2):
            if is_drawn and reached < len(before_end):
                self._now(lambda matcher: matcher.compute_bitmask(), b"")
                reached = self._now(lambda matcher: self._move(matcher, before_end), 0)
        return reached

    def _move(self, matcher: llguidance.LLMatcher, path: Items[int]) -> int:
        tokens, start = self._tokens, self.num_accepted
        common = 0
        while common < len(path) and start + common < len(tokens) and tokens[start + common] == path[common]:
            common += 1
        if surplus := len(tokens) - start - common:
            matcher.rollback(surplus)
            del tokens[start + common :]
        if common < len(path):
            consumed = matcher.try_consume_tokens(list(path[common:]))
            tokens += path[common : common + consumed]
        return len(tokens) - start

    def _now(self, action: Callable[[llguidance.LLMatcher], Any], otherwise: Any) -> Any:
        """Let the parser do something. If it exceeds a limit, it may be for states that other sequences have made: a
        parser of this sequence's own then does it again. If that fails too, the sequence cannot go on."""
        if self.error is not None:
            return otherwise
        if self._matcher is None:
            self._matcher = self._grammar.matcher()
        result = action(self._matcher)
        if not self._matcher.is_error():
            return result
        if not self._is_fresh:
            self._is_fresh = True
            self._matcher = self._grammar.fresh_matcher()
            self._matcher.try_consume_tokens(self._tokens)
            return self._now(action, otherwise)
        self.error = _complaint(self._matcher)
        return otherwise


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidParameter(
            "grammar needs the package llguidance, which is not installed; run: pip install 'foredraft[grammar]'"
        ) from error
    return llguidance


def _source(grammar: Mapping[str, Any]) -> str:
    """A grammar as the parser reads it. Its kind was checked when the request was made (see SamplingParams)."""
    matcher = _library().LLMatcher
    try:
        if "regex" in grammar:
            source = matcher.grammar_from_regex(grammar["regex"])
        elif "lark" in grammar:
            source = matcher.grammar_from_lark(grammar["lark"])
        elif "choice" in grammar:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in grammar["choice"])
            source = matcher.grammar_from_lark(f"start: {choices}")
        else:
            source = matcher.grammar_from_json_schema(json.dumps(grammar), overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise InvalidParameter(f"grammar cannot be used: {_first_line(str(error))}.") from error
    return str(source)


def _complaint(matcher: llguidance.LLMatcher) -> str:
    reason = _first_line(matcher.get_error())
    if reason.startswith("NoExtension"):
        reason = "no text fits it"
    return f"grammar cannot be used: {reason}."


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or ["the parser gives no reason"])[0].strip().rstrip(".")
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 3]}..."
