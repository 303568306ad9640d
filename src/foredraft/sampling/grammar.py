"""Grammars: what a request allows its output to be, as a mask over the vocabulary at every node of a draft.

The parser is llguidance. It follows tokens and rolls them back, so one parser per sequence visits a whole draft tree.
Its masks are a function of the tokens alone, whatever it visited before. Where the grammar leaves one text only, the
mask holds the one token with which the tokenizer would write it: such tokens are forced.

Compiling and every step of the parser have limits, counted in states and not in seconds, so that the same request gets
the same answer on every machine. No sequence compiles: whoever adds a request has its grammar compiled first.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import InvalidParameter
from foredraft.sampling.gbnf_lexemes import to_lark
from foredraft.sampling.grammar_size import check_size

if TYPE_CHECKING:
    import llguidance

_MOST_CACHED = 32  # compiled grammars
_MOST_CACHED_LENGTH = 262_144  # characters of all of them: what a compiled one takes grows with its length
_MOST_FORCED = 2048  # tokens, one after the other
_NUM_PROBED = 8  # steps of the parser before a grammar is taken
_MOST_SHOWN = 200  # characters of what the parser says is wrong

# Compiling both parsers takes at most about two seconds, and a step some milliseconds. A full automaton takes 15 MB.
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_items_in_row": 500,
    "max_lexer_states": 30_000,
    "max_grammar_size": 100_000,
}
_AUTOMATON = "lexer error: too many"  # how its error begins when the automaton that copies share is full
_ITEMS = "too much may follow at one place; use fewer optional properties or alternatives"
_PATTERNS = "its patterns are too large; use simpler ones and lower their repetitions"
# What to do, by how the parser names a limit that is exceeded.
_REMEDIES = {
    "Current row has": _ITEMS,
    "Too many items": _ITEMS,
    _AUTOMATON: _PATTERNS,
    "fuel exhausted": _PATTERNS,
    "lexer precomputation failed": _PATTERNS,
    "initial lexer configuration": _PATTERNS,
    "grammar size (number of symbols)": "it is too large; use fewer properties or rules",
}
_HINT = re.compile("; (?:consider|either|try) ")  # what the parser says to programmers
# JSON as json.dumps writes it. Free white space would let a model write nothing else, and leave few tokens forced.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": False,
}


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the compiled ones by their content. Any thread may compile; one
    grammar is compiled at a time, and requests that come with the same one wait for it together."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size  # of the target's logits
        self._eos_token_ids = eos_token_ids
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # of the cache
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()  # the one that was used last comes last

    def prepare(self) -> None:
        """Read the tokenizer, if grammars can be used at all. It takes half a second in which no other thread runs."""
        with self._compiling, suppress(InvalidParameter):
            _ = self._tokenizer

    def find(self, grammar: Mapping[str, Any]) -> CompiledGrammar | None:
        """A grammar that is compiled already. Waits for nobody."""
        text = json.dumps(grammar)
        with self._lock:
            compiled = self._compiled.get(text)
            if compiled is None or compiled.is_full:
                return None
            self._compiled.move_to_end(text)
            return compiled

    def compile(self, grammar: Mapping[str, Any]) -> CompiledGrammar:
        """Raises InvalidParameter for a grammar that cannot be used. Takes milliseconds, at worst a few seconds, in
        which other threads run."""
        with self._compiling:
            compiled = self.find(grammar)
            if compiled is None:
                check_size(grammar)
                compiled = CompiledGrammar(_source(grammar), self._tokenizer, self._vocab_size, self._eos_token_ids)
                text = json.dumps(grammar)
                with self._lock:
                    self._compiled[text] = compiled
                    self._compiled.move_to_end(text)
                    while len(self._compiled) > _MOST_CACHED or sum(map(len, self._compiled)) > _MOST_CACHED_LENGTH:
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
    """A grammar that any number of sequences follow, each with a constraint of its own.

    Parsers that are copies of each other share one automaton, which grows while they are used. So there are two: when
    the first is full, the sequences go on with the second, and the next request compiles the grammar again.
    """

    def __init__(
        self, source: str, tokenizer: llguidance.LLTokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.is_full = False  # whether the first automaton has reached its limit
        self._first = _built(source, tokenizer)
        self._probe(self._first.deep_copy())
        self._second = _built(source, tokenizer)

    def constraint(self, ignore_eos: bool = False) -> GrammarConstraint:
        return GrammarConstraint(self, ignore_eos)

    def matcher(self, is_renewed: bool) -> llguidance.LLMatcher:
        """A parser at the beginning; a renewed one is for a sequence that found the first automaton full."""
        self.is_full = self.is_full or is_renewed
        return (self._second if is_renewed else self._first).deep_copy()

    def _probe(self, matcher: llguidance.LLMatcher) -> None:
        """Follow the grammar for some steps, along forced tokens and the first ones that are allowed. Finds what no
        text fits, what begins and never ends, and what exceeds the limits of the parser at its beginning."""
        for step in range(_NUM_PROBED):
            allowed = np.flatnonzero(_unpacked(matcher.compute_bitmask(), self.vocab_size)).tolist()
            forced = matcher.compute_ff_tokens()
            if matcher.is_error():
                raise InvalidParameter(_complaint(matcher))
            if step == 0 and len(forced) > _MOST_FORCED:
                raise InvalidParameter(
                    f"grammar cannot be used: it forces more than {_MOST_FORCED} tokens at its beginning, so it may "
                    "have no end; give a recursive rule an alternative."
                )
            tokens = forced or [token for token in allowed if token not in self.eos_token_ids][:1]
            if not tokens:
                return
            matcher.try_consume_tokens(tokens)


class GrammarConstraint:
    """What one sequence may write next. A path is the tokens behind those that were accepted.

    The parser stands wherever the last call left it. A call moves it along the tree: back to the last common token,
    then down the new path. No call raises or compiles: a parser that exceeds a limit allows nothing more, and `error`
    says why.
    """

    def __init__(self, grammar: CompiledGrammar, ignore_eos: bool) -> None:
        self._grammar = grammar
        self._ignore_eos = ignore_eos
        self._matcher: llguidance.LLMatcher | None = None  # made when it is first needed
        self._is_renewed = False  # whether the parser is one of those behind a full automaton
        self._tokens: list[int] = []  # that the parser has consumed: the accepted ones, then a path
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by path, since the last accepted tokens
        self.num_accepted = 0
        self.error: str | None = None

    def mask(self, path: Items[int]) -> Tensor:
        """Which tokens may follow a path: bool [vocab]. After the end of the grammar only end-of-text tokens may, so
        that there is always one. Those are allowed wherever the grammar may end, unless the request ignores them and
        there are others."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._computed_mask(path)
        return self._masks[key]

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
            mask = torch.from_numpy(_unpacked(self._now(lambda matcher: matcher.compute_bitmask(), b""), vocab))
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
        path that was drawn under masks, which must be allowed, is tried again after one, at first by the same parser
        and then by the renewed one.
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
        """Let the parser do something. Where it finds its automaton full, of states that other sequences have made
        perhaps, a renewed parser does it again. If that fails too, the sequence cannot go on."""
        if self.error is not None:
            return otherwise
        if self._matcher is None:
            self._matcher = self._grammar.matcher(self._is_renewed)
            self._matcher.try_consume_tokens(self._tokens)
        result = action(self._matcher)
        if not self._matcher.is_error():
            return result
        if not self._is_renewed and _AUTOMATON in self._matcher.get_error():
            self._is_renewed, self._matcher = True, None
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
    if "gbnf" in grammar:
        grammar = {"lark": to_lark(grammar["gbnf"])}
    try:
        if "regex" in grammar:
            source = matcher.grammar_from_regex(grammar["regex"])
        elif "lark" in grammar:
            source = matcher.grammar_from_lark(grammar["lark"])
        elif "choice" in grammar:
            choices = " | ".join(map(_lark_text, grammar["choice"]))
            # One terminal: the automaton follows thousands of choices, where rules would be parsed side by side.
            source = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        else:
            source = matcher.grammar_from_json_schema(json.dumps(grammar), overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise InvalidParameter(f"grammar cannot be used: {_reason(str(error))}.") from error
    return str(source)


def _lark_text(text: str) -> str:
    """A text as Lark spells it: like JSON, which does not escape the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _built(source: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    library = _library()
    limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
    matcher: llguidance.LLMatcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidParameter(_complaint(matcher))
    return matcher


def _unpacked(bits: bytes, vocab_size: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab_size].view(np.bool_)


def _complaint(matcher: llguidance.LLMatcher) -> str:
    reason = _reason(matcher.get_error())
    if reason.startswith("NoExtension"):
        reason = "no text fits it"
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in reason), None)
    if remedy is not None:
        reason = f"{remedy} ({_HINT.split(reason)[0]})"
    return f"grammar cannot be used: {reason}."


def _reason(text: str) -> str:
    """The first line of what a parser says; and of a parser within, which quotes and points in lines of its own, what
    it found."""
    first, *others = text.strip().splitlines() or ["the parser gives no reason"]
    found = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    line = ": ".join([first.strip().rstrip(".:"), *found[:1]])
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 3]}..."
