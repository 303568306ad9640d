"""The page at `/docs`: routes and their fields for people, written from the schema. It has no script."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.page import POLICY

router = APIRouter(include_in_schema=False)

_HEAD = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Foredraft: routes</title>
<link rel="stylesheet" href="/static/theme.css">
<link rel="stylesheet" href="/static/docs.css">
<main>
<h1>Routes of this server</h1>
<p>Clients of OpenAI use <code>/v1</code> of this address as their base URL; clients of Anthropic, of Ollama and of
llama.cpp's server use the address itself. <a href="/openapi.json">openapi.json</a> is the same for programs.</p>
"""


@router.get("/docs")
async def docs(request: Request) -> Response:
    schema = request.app.openapi()  # made once, then kept
    parts = [
        _route(method, path, about, schema) for path, of in schema["paths"].items() for method, about in of.items()
    ]
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(_HEAD + "\n".join(parts) + "\n</main>\n</html>\n", headers=headers, media_type="text/html")


def _route(method: str, path: str, about: dict[str, Any], schema: dict[str, Any]) -> str:
    told = escape(about.get("description") or about.get("summary") or "")
    return f"<h2>{escape(method.upper())} {escape(path)}</h2>\n<p>{told}</p>\n{_fields(about, schema)}"


def _fields(about: dict[str, Any], schema: dict[str, Any]) -> str:
    """The table of what a body may have; nothing for routes without one."""
    content = about.get("requestBody", {}).get("content", {}).get("application/json", {})
    body = _followed(content.get("schema", {}), schema)
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{'yes' if name in body.get('required', ()) else ''}</td></tr>"
        for name, field in body.get("properties", {}).items()
    ]
    if not rows:
        return ""
    head = "<tr><th scope='col'>field</th><th scope='col'>type</th><th scope='col'>required</th></tr>"
    return f'<div class="fields"><table>{head}{"".join(rows)}</table></div>'


def _followed(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = part.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = schema["components"]["schemas"][name] if name else part
    return found


def _type(field: dict[str, Any]) -> str:
    """In words: what is optional may always be null, which need not be said."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"] if each.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
