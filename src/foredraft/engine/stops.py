"""Where a text ends: end-of-text tokens, stop tokens, stop strings, the length limit. Checked token by token, so
that an accepted path is cut exactly where plain decoding would have stopped."""

from __future__ import annotations

from collections.abc import Iterable

from foredraft.engine.detokenizer import Detokenizer
from foredraft.types import Sequence, Stop


def find_stop(
    sequence: Sequence, tokens: Iterable[int], eos_token_ids: frozenset[int], detokenizer: Detokenizer
) -> tuple[Stop, list[int]]:
    """Feed new tokens to the detokenizer up to the first that ends the text; that one is kept, its text is not.

    Also tells how much text was fit to be shown after each kept token. A text that ends is finished here: what is left
    of an incomplete character may hold a stop string too.
    """
    stable: list[int] = []
    for kept, token in enumerate(tokens, start=1):
        stop = _stop_at(sequence, token, kept, eos_token_ids, detokenizer)
        if stop is not None and not isinstance(stop.stop_reason, str) and (string := detokenizer.finish()) is not None:
            stop = Stop(kept, "stop", string)
        stable.append(detokenizer.stable())
        if stop is not None:
            return stop, stable
    return Stop(len(stable)), stable


def _stop_at(
    sequence: Sequence, token: int, kept: int, eos_token_ids: frozenset[int], detokenizer: Detokenizer
) -> Stop | None:
    if token in eos_token_ids and not sequence.params.ignore_eos:
        return Stop(kept, "stop")
    if token in sequence.params.stop_token_set:
        return Stop(kept, "stop", token)
    stop_string = detokenizer.append(token)
    if stop_string is not None:
        return Stop(kept, "stop", stop_string)
    if sequence.num_output_tokens + kept >= sequence.max_tokens:
        return Stop(kept, "length")
    return None
