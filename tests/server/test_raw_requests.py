"""Bytes on a socket that are no request, or one that is too large or too slow. Each gets the right status, and
afterwards the server is as before."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

import pytest

from tests.server.running_server import RunningServer
from tests.server.test_hostile import CHAT, chat

pytestmark = pytest.mark.usefixtures("unharmed")

CLOSED = 0  # the connection is closed without an answer


@dataclass(frozen=True)
class Raw:
    """Bytes for a socket, in pieces; the client then waits for an answer."""

    pieces: tuple[bytes, ...]


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


SOCKETS: dict[str, tuple[Raw, int]] = {
    "no HTTP": (Raw((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",)), 400),
    "a giant header": (Raw((head(CHAT, "x-large: " + "x" * 100_000),)), 400),
    "a thousand headers": (Raw((head(CHAT, *(f"x-{i}: {'y' * 40}" for i in range(1000))),)), 400),
    "headers that never end": (Raw((f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-".encode() + b"y" * 40_000,)), 400),
    "a content-length that lies upwards": (Raw((head(CHAT, "content-length: 500") + b"{}",)), 408),
    "a content-length over the limit": (Raw((head(CHAT, "content-length: 99999999999"),)), 413),
    "a negative content-length": (Raw((head(CHAT, "content-length: -5"),)), 400),
    "a body in chunks over the limit": (
        Raw((head(CHAT, "transfer-encoding: chunked"), *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 20)),
        413,
    ),
    "trailers": (Raw((head(CHAT, "transfer-encoding: chunked") + b"0\r\n" + b"x: y\r\n" * 2,)), 400),
    "a body byte by byte": (
        Raw(
            (
                head(CHAT, "transfer-encoding: chunked"),
                *(b"1;x=y\r\n" + bytes([each]) + b"\r\n" for each in json.dumps(chat()).encode()),
                b"0\r\n\r\n",
            )
        ),
        200,
    ),
    "slow headers": (Raw((f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-".encode(),)), CLOSED),
    "nothing at all": (Raw((b"",)), CLOSED),
    "a slow body": (Raw((head(CHAT, "content-length: 50") + b'{"model":',)), 408),
    "a bare path upwards": (Raw((head("/../../etc/passwd", "content-length: 0", method="GET"),)), 404),
    "bytes in a path": (Raw((b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",)), 400),
    "an upgrade": (Raw((head("/", "connection: upgrade", "upgrade: websocket", method="GET"),)), 200),
}


@pytest.mark.parametrize("name", SOCKETS)
def test_sockets(server: RunningServer, name: str) -> None:
    raw, expected = SOCKETS[name]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        answer = b""
        try:
            for piece in raw.pieces:
                client.sendall(piece)
            while b"\r\n" not in answer and (data := client.recv(65536)):
                answer += data
        except ConnectionError:
            pass  # refused while it was still sending
        assert (int(answer.split()[1]) if answer else CLOSED) == expected, answer[:200]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (SOCKETS["trailers"][0].pieces[0], "Trailers are not taken."),
        (head(CHAT, "x-large: " + "x" * 17_000), "The headers are too large."),  # little enough to be read at once
        (SOCKETS["no HTTP"][0].pieces[0], "Invalid HTTP request received."),
    ],
    ids=["trailers", "headers", "no HTTP"],
)
def test_what_is_no_request_is_told_why(server: RunningServer, sent: bytes, reason: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(sent)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert b"content-type: application/json" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == reason


@pytest.mark.parametrize("beginning", [b"0\r\nx: ", b"1;"], ids=["a trailer", "a chunk extension"])
def test_what_never_ends_between_chunks(server: RunningServer, beginning: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head(CHAT, "transfer-encoding: chunked", "expect: 100-continue"))
        assert client.recv(65536).startswith(b"HTTP/1.1 100")  # the headers have been read
        client.sendall(beginning + b"y" * 20_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 400")
