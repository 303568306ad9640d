"""Which requests of a server get equal salts."""

from __future__ import annotations

from itertools import combinations

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

from foredraft.params import MAX_SALT_LENGTH, SamplingParams
from foredraft.server.sharing import shared_salt, with_sharing


def test_salts_of_different_kinds_and_keys_differ_whatever_is_given() -> None:
    """Also where a client gives what another request got, or what runs into the names of keys and kinds."""
    got = [shared_salt(key, "", False) for key in (0, 1, 10)] + [shared_salt(0, "", True)]
    tricky = ["a", "key", "all", "0", "1:0", "10", "None", "1:a", "5:given1:0", "\ud800", *filter(None, got)]
    salts = [*got, *(shared_salt(key, given, False) for key in (None, 0, 1, 10) for given in tricky)]
    assert None not in salts
    assert all(one != other for one, other in combinations(salts, 2))


def test_a_given_salt_is_the_same_where_the_operator_shares() -> None:
    for key in (None, 0, 1):
        assert shared_salt(key, "a", True) == shared_salt(key, "a", False)


def test_without_key_and_salt_a_request_is_private_unless_the_operator_shares() -> None:
    assert shared_salt(None, "", False) is None
    assert shared_salt(None, "", True) == shared_salt(0, "", True) == shared_salt(1, "", True) is not None


def test_private_requests_leave_nothing_behind_and_have_each_a_salt() -> None:
    first, second = (with_sharing(SamplingParams(seed=3), None, False) for _ in range(2))
    assert not first.remember and not second.remember
    assert first.cache_salt != second.cache_salt and len(first.cache_salt) >= 32
    assert first.seed == 3


def test_what_is_shared_is_remembered_under_a_salt_of_moderate_length() -> None:
    params = with_sharing(SamplingParams(cache_salt="x" * MAX_SALT_LENGTH), 7, False)
    assert params.remember and 32 <= len(params.cache_salt) <= 64
