"""Where a text ends: end-of-text tokens, stop tokens, stop strings, the end of a grammar, the length limit. Checked
token by token, so that an accepted path is cut exactly where plain decoding would have stopped."""

from __future__ import annotations

from collections.abc import Sequence as Items

from foredraft.engine.detokenizer import Detokenizer
from foredraft.types import Sequence, Stop

_GOES_ON = Stop(1)  # after nearly every step: one token more


def find_stop(
    sequence: Sequence, tokens: Items[int], eos_token_ids: frozenset[int], detokenizer: Detokenizer
) -> tuple[Stop, list[int]]:
    """Feed new tokens to the detokenizer up to the first that ends the text; that one is kept, its text is not.

    Also tells how much text was fit to be shown after each kept token. A text that ends is finished here: what is left
    of an incomplete character may hold a stop string too.
    """
    params, constraint = sequence.params, sequence.constraint
    room = sequence.max_tokens + sequence.num_prompt_tokens - len(sequence.token_ids)
    stable: list[int] = []
    for kept, token in enumerate(tokens, start=1):
        stop: Stop | None = None
        if token in eos_token_ids and not params.ignore_eos:
            stop = Stop(kept, "stop")
        elif token in params.stop_token_set:
            stop = Stop(kept, "stop", token)
        elif (string := detokenizer.append(token)) is not None:
            stop = Stop(kept, "stop", string)
        elif constraint is not None and constraint.is_complete(tokens[:kept]):
            stop = Stop(kept, "stop")
        elif kept >= room:
            stop = Stop(kept, "length")
        if stop is not None and not isinstance(stop.stop_reason, str) and (string := detokenizer.finish()) is not None:
            stop = Stop(kept, "stop", string)
        stable.append(detokenizer.stable())
        if stop is not None:
            return stop, stable
    return _GOES_ON if len(stable) == 1 else Stop(len(stable)), stable
