"""Under which names the server answers, and whose pages may use it. A browser runs the scripts of any site, and a name
of that site may lead to this machine."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from foredraft.errors import InvalidParameter
from foredraft.server.auth import Gate
from foredraft.server.errors import ApiError

ANY = "*"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Sites:
    """What the operator allows.

    is_local  the server listens on a loopback address, so that nobody has a reason to call it by another name
    hosts     names that it has beside the local ones; where there are some, others are refused
    origins   other sites whose scripts may use it
    """

    is_local: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != ANY and _origin(f"http://{host}") != ("http", host.lower(), _PORTS["http"]):
                raise InvalidParameter(
                    f"--allow-host {host!r} must be a name or an address without a port, such as chat.example.com."
                )
        for origin in self.origins:
            if origin not in (ANY, "null") and _origin(origin) is None:
                raise InvalidParameter(f"--cors {origin!r} must be an origin such as https://chat.example.com, or '*'.")

    def check(self, headers: Headers) -> None:
        """Raises ApiError. Programs that are no browsers send no Origin, and may leave out Host."""
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._is_own(_split(host)[0]):
                raise ApiError(
                    403,
                    f"This server does not answer as {host[:100]!r}; its operator can allow that with --allow-host.",
                )
        for origin in headers.getlist("origin"):
            if not self._may_call(origin, hosts):
                raise ApiError(
                    403, f"Pages of {origin[:100]!r} may not use this server; its operator can allow that with --cors."
                )

    def _is_own(self, name: str) -> bool:
        if ANY in self.hosts or not (self.is_local or self.hosts):
            return True
        return is_local_name(name) or name.strip("[]") in (host.strip("[]").lower() for host in self.hosts)

    def _may_call(self, origin: str, hosts: list[str]) -> bool:
        if ANY in self.origins or origin in self.origins:
            return True
        parsed = _origin(origin)
        if parsed is None:
            return False
        scheme, name, port = parsed
        return any((name, port) == (own, own_port or _PORTS[scheme]) for own, own_port in map(_split, hosts))


LOCAL = Sites(is_local=True)


def is_local_name(name: str) -> bool:
    """Whether it leads to this machine wherever it is used."""
    try:
        return name == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _split(host: str) -> tuple[str, int | None]:
    """The name and the port of a Host header."""
    name, colon, port = host.rpartition(":")
    if colon and port.isdecimal() and len(port) <= 5 and (":" not in name or name.endswith("]")):
        return name.lower(), int(port)
    return host.lower(), None


def _origin(text: str) -> tuple[str, str, int] | None:
    """Scheme, name and port of an origin; None for what is none, such as "null"."""
    scheme, _, host = text.partition("://")
    name, port = _split(host)
    if scheme not in _PORTS or not name or any(character in host for character in "/?#@ "):
        return None
    return scheme, name, port or _PORTS[scheme]


def site_middleware(sites: Sites) -> list[Middleware]:
    """What stands in front of everything else, the first first. Browsers send no key with the question whether they may
    call, so it is answered before keys are looked at."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=sites.origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY,),
        expose_headers=("x-request-id", "retry-after", "x-foredraft-ignored", "x-foredraft-note"),
    )
    check = Middleware(Gate, check=lambda scope: sites.check(Headers(scope=scope)))
    return [check, cors] if sites.origins else [check]
