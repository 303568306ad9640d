"""Which requests share the prefix cache and remembered answers: those of equal salts, and who gets which salt.

A client chooses neither: what it gives as `cache_salt` only narrows what its key, or the operator, lets it share.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from foredraft.params import SamplingParams
from foredraft.prefix import root_name


def shared_salt(key: int | None, given: str, shares_answers: bool) -> str | None:
    """The salt of all requests with which this one shares; None: it is private and shares with nobody.

    `key` is the place of its API key among the operator's, None without keys. `given` is its own `cache_salt`, "" for
    none. With `shares_answers` all requests without one share, whatever their keys. Whatever is given, it is never the
    salt of another key or of another kind of request.
    """
    if given:
        return root_name("given", str(key), given).hex()
    if shares_answers:
        return root_name("all").hex()
    return None if key is None else root_name("key", str(key)).hex()


def with_sharing(params: SamplingParams, key: int | None, shares_answers: bool) -> SamplingParams:
    """The params of one request with the salt that it gets in place of the one that it gave. What is private gets a new
    one, for all its samples and prompts, and leaves nothing behind."""
    salt = shared_salt(key, params.cache_salt, shares_answers)
    if salt is None:
        return replace(params, cache_salt=secrets.token_hex(16), remember=False)
    return replace(params, cache_salt=salt)
