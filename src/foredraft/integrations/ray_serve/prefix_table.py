"""Which replica has the beginning of a prompt in its prefix cache, and when another one is the better choice."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from foredraft.prefix import extended_name, root_name
from foredraft.server.sharing import shared_salt

_BLOCK = 128  # characters: about two blocks of a KV cache
_MAX_BLOCKS = 64  # prompts that agree for so long go to the same replica anyway
_BEFORE_THE_PROMPT = ("tools", "system", "instructions")  # fields that chat templates write first
_PROMPT = ("prompt", "messages", "input")  # where each API has the prompt
_MAX_HOLDERS = 8  # replicas that are remembered for one prefix


def prefix_names(body: bytes, key: int | None, shares_answers: bool) -> tuple[bytes, ...]:
    """Names of the prefixes of a request's prompt, the shortest first; none for bodies without a prompt and for private
    requests, of which no replica keeps anything. Requests have names in common only where they share their caches.

    A `cache_salt` is a prefix of its own: what a replica remembers for a salt serves all requests of that salt.
    """
    try:
        fields: Any = json.loads(body)
    except ValueError:  # the replica will say what is wrong
        return ()
    if not isinstance(fields, dict):
        return ()
    given = fields.get("cache_salt") or ""
    salt = shared_salt(key, given, shares_answers) if isinstance(given, str) else None
    if salt is None:
        return ()
    name = root_name(salt)
    names = [name] if given else []
    text = _prompt_text(fields)
    for start in range(0, min(len(text), _MAX_BLOCKS * _BLOCK) - _BLOCK + 1, _BLOCK):
        name = extended_name(name, map(ord, text[start : start + _BLOCK]))
        names.append(name)
    return tuple(names)


def _prompt_text(fields: dict[str, Any]) -> str:
    """A text that begins equally when prompts do."""
    prompt = next((fields[name] for name in _PROMPT if fields.get(name)), "")
    head = "".join(json.dumps(fields[name]) for name in _BEFORE_THE_PROMPT if fields.get(name))
    # A conversation that goes on has the same text up to the bracket at the end.
    return head + (prompt if isinstance(prompt, str) else json.dumps(prompt)[:-1])


class PrefixTable:
    """Remembers for the last `capacity` prefixes which replicas have served them."""

    def __init__(self, slack: int, capacity: int = 65536) -> None:
        self._slack = slack
        self._capacity = capacity
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # replicas by prefix, the latest last

    def order(self, names: Sequence[bytes], loads: dict[str, int]) -> list[str]:
        """The replicas of `loads` (requests that each has), the best first.

        First come those that have the longest known prefix of the request, and at most `slack` requests more than the
        idlest replica: a prefix is worth less than a queue. Among equals the order of `loads` stays.
        """
        most = min(loads.values(), default=0) + self._slack
        holders = self._longest(names, loads)

        def cost(replica: str) -> tuple[bool, int]:
            is_warm = replica in holders and loads[replica] <= most
            return not is_warm, loads[replica]

        return sorted(loads, key=cost)

    def note(self, names: Sequence[bytes], replica: str) -> None:
        """The replica got a request with these prefixes."""
        for name in names:
            others = (each for each in self._holders.pop(name, ()) if each != replica)
            self._holders[name] = (*others, replica)[-_MAX_HOLDERS:]
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def _longest(self, names: Sequence[bytes], loads: dict[str, int]) -> tuple[str, ...]:
        """The living replicas that know the longest prefix."""
        for name in reversed(names):
            living = tuple(replica for replica in self._holders.get(name, ()) if replica in loads)
            if living:
                return living
        return ()
