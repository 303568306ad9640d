"""Every hostile request gets its status, and the next one gets the answer that it always gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.hostile_requests import REQUESTS
from tests.server.running_server import RunningServer
from tests.server.test_hostile import check_error


@pytest.fixture(autouse=True, scope="module")
def as_before(big_server: RunningServer) -> Iterator[None]:
    """After all of them, too."""
    before = big_server.canary()
    yield
    assert big_server.canary() == before
    big_server.until_idle()


@pytest.mark.parametrize("name", REQUESTS)
def test_hostile_requests(big_server: RunningServer, name: str) -> None:
    request = REQUESTS[name]
    status, data, _ = big_server.request("POST", request.path, request.content, request.headers)
    check_error(request.path, status, request.status, data)


def test_there_are_enough_of_them() -> None:
    assert len(REQUESTS) >= 60
