"""Which names the server answers to, and whose pages may use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

from starlette.datastructures import Headers

from foredraft.cli import main
from foredraft.errors import InvalidParameter
from foredraft.server.bodies import IGNORED_HEADER
from foredraft.server.errors import ApiError
from foredraft.server.generation import NOTE_HEADER
from foredraft.server.sites import LOCAL, Sites, is_local_name
from tests.server.running_server import CANARY, RunningServer, load_tiny_model, running

FRIEND = "https://friend.example"
EVERYWHERE = Sites()


def is_let_in(sites: Sites, host: str | None, origin: str | None = None) -> bool:
    given = {"host": host, "origin": origin}
    try:
        sites.check(Headers({name: value for name, value in given.items() if value is not None}))
    except ApiError as error:
        assert error.status == 403
        return False
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8000", None], ids=str
)
def test_local_names(host: str | None) -> None:
    assert is_let_in(LOCAL, host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "evil.example:80:80",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.168.0.5:8000",
        "[::2]:8000",
        "localhost:x",
        "localhost:999999",
        "@localhost",
    ],
)
def test_other_names_are_refused_on_a_loopback_address(host: str) -> None:
    assert not is_let_in(LOCAL, host)
    assert is_let_in(EVERYWHERE, host)
    assert is_let_in(Sites(True, hosts=("*",)), host)


def test_allowed_names() -> None:
    for sites in (Sites(True, ("Chat.example",)), Sites(False, ("chat.example",))):
        assert (
            is_let_in(sites, "chat.example:8000") and is_let_in(sites, "CHAT.example") and is_let_in(sites, "127.0.0.1")
        )
        assert not is_let_in(sites, "evil.example")
    assert is_let_in(Sites(True, ("fe80::1",)), "[fe80::1]:8000")


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("127.0.0.1", "http://127.0.0.1", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("chat.example", "https://chat.example", True),  # a proxy in front has the certificate
        ("chat.example:443", "https://chat.example", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("localhost:8000", "http://localhost", False),
        ("localhost:8000", "https://evil.example", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "", False),
        ("localhost:8000", "file://", False),
        ("localhost:8000", "http://localhost:8000@evil.example", False),
        ("localhost:8000", "http://localhost:8000/", False),
        (None, "http://localhost", False),
    ],
)
def test_origins(host: str | None, origin: str, expected: bool) -> None:
    assert is_let_in(Sites(True, ("chat.example",)), host, origin) == expected
    assert is_let_in(EVERYWHERE, host, origin) == expected
    assert is_let_in(Sites(origins=("*",)), host, origin)
    assert is_let_in(Sites(origins=(FRIEND,)), host, FRIEND)


@pytest.mark.parametrize(("name", "own", "foreign"), [("host", "x", "evil"), ("origin", "http://x", "http://evil")])
def test_of_several_headers_each_must_be_allowed(name: str, own: str, foreign: str) -> None:
    headers = [("host", "x")] * (name == "origin") + [(name, own), (name, foreign)]
    with pytest.raises(ApiError, match=f"{foreign}.*its operator can allow that"):
        Sites(hosts=("x",)).check(Headers(raw=[(key.encode(), value.encode()) for key, value in headers]))


@pytest.mark.parametrize(
    ("arguments", "sites"),
    [
        ([], LOCAL),
        (["--host", "0.0.0.0"], EVERYWHERE),
        (["--allow-host", "a.example", "--allow-host", "b.example"], Sites(True, ("a.example", "b.example"))),
        (["--host", "0.0.0.0", "--cors", FRIEND], Sites(origins=(FRIEND,))),
    ],
    ids=str,
)
def test_the_command_hands_on_what_its_operator_allows(
    arguments: list[str], sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the model's name without its path."""
    made: list[Any] = []
    listener = SimpleNamespace(getsockname=lambda: ("", 1))
    for name, stand_in in {
        "server.run.listen": lambda *_: nullcontext(listener),
        "cli.options.ModelOptions.open": lambda _: nullcontext(),
        "server.service.Service": lambda llm, names, *_, **__: made.append(names),
        "server.run.make_server": lambda _, sites, **__: (
            made.append(sites) or SimpleNamespace(run=lambda sockets: None)
        ),
    }.items():
        monkeypatch.setattr(f"foredraft.{name}", stand_in)
    monkeypatch.setattr(sys, "argv", ["foredraft", "serve", "--model", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert not ended.value.code and made == [[tmp_path.name], sites]


@pytest.mark.parametrize(
    "fields",
    [{"hosts": (host,)} for host in ("", "https://x", "x:80", "x/y", "a b")]
    + [{"origins": (origin,)} for origin in ("", "x.example", "https://", "https://x/y", "ftp://x", "https://a@b")],
    ids=str,
)
def test_what_an_operator_may_allow(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=r"--(allow-host|cors) .* must be"):
        Sites(**fields)


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True)])
def test_local_addresses(host: str, expected: bool) -> None:
    assert is_local_name(host) == expected
    assert not any(map(is_local_name, ("0.0.0.0", "::", "192.168.0.5", "example.com", "")))


@pytest.fixture(scope="module")
def friendly(tiny_folder: Path) -> Iterator[RunningServer]:
    with running(load_tiny_model(tiny_folder), sites=Sites(True, origins=(FRIEND,)), api_keys=["k"]) as started:
        yield started


REBOUND = {"host": "evil.example:8000"}
FOREIGN = {"origin": "https://evil.example"}


@pytest.mark.parametrize("headers", [REBOUND, FOREIGN, {**REBOUND, "origin": "http://evil.example:8000"}], ids=str)
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/stats"), ("GET", "/"), ("POST", "/v1/completions")])
def test_others_get_nothing(server: RunningServer, method: str, path: str, headers: dict[str, str]) -> None:
    status, data, sent = server.request(method, path, CANARY if method == "POST" else None, headers)
    assert status == 403 and b"its operator can allow that" in data
    assert "access-control-allow-origin" not in sent


def test_the_page_may(server: RunningServer) -> None:
    status, _, _ = server.request("POST", "/v1/completions", CANARY, {"origin": server.url})
    assert status == 200


def test_allowed_sites_read_answers(friendly: RunningServer) -> None:
    headers = {"origin": FRIEND, "authorization": "Bearer k"}
    status, _, sent = friendly.request("POST", "/v1/completions", CANARY, headers)
    assert (status, sent["access-control-allow-origin"]) == (200, FRIEND)
    assert "origin" in sent["vary"].lower()
    exposed = sent["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", IGNORED_HEADER, NOTE_HEADER} <= set(exposed)
    assert friendly.request("POST", "/v1/completions", CANARY, {**headers, **FOREIGN})[0] == 403


def test_their_browsers_may_find_out(friendly: RunningServer) -> None:
    """Without a key: browsers send none with this question."""
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    status, _, sent = friendly.request("OPTIONS", "/v1/completions", None, {"origin": FRIEND, **wanted})
    assert (status, sent["access-control-allow-origin"]) == (200, FRIEND)
    assert "authorization" in sent["access-control-allow-headers"] and "POST" in sent["access-control-allow-methods"]
    assert friendly.request("OPTIONS", "/v1/completions", None, {**FOREIGN, **wanted})[0] == 403
