"""The page at `/`: files of this package, read once, and the headers that keep anything else out of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent / "static"
_TYPES = {  # by ending: the tables of operating systems differ
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {file.name: file.read_bytes() for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}

# Scripts, styles and requests only from and to this server, no inline code, no frames. Trusted types: no string becomes
# HTML or code, so nothing that a model writes can.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@router.get("/")
async def page(request: Request) -> Response:
    return _file(request, "index.html")


@router.get("/static/{name}")
async def static(name: str, request: Request) -> Response:
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    """Browsers keep a copy and ask whether it is still the right one: files of two versions never meet."""
    if name not in FILES:
        raise HTTPException(404)
    content = FILES[name]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
        "etag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])
