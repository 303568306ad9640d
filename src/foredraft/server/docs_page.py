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
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
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
    routes = [(method, path, about) for path, of in schema["paths"].items() for method, about in of.items()]
    bodies = [_body(about, schema) for _, _, about in routes]
    parts = [_route(*route, body) for route, body in zip(routes, bodies, strict=True)]
    names = _reached(bodies, schema)
    parts += ["<h2>Parts of bodies</h2>", *(_part(name, schema["components"]["schemas"][name]) for name in names)]
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(_HEAD + "\n".join(parts) + "\n</main>\n</html>\n", headers=headers, media_type="text/html")


def _route(method: str, path: str, about: dict[str, Any], body: dict[str, Any]) -> str:
    told = escape(about.get("description") or about.get("summary") or "")
    return f"<h2>{escape(method.upper())} {escape(path)}</h2>\n<p>{told}</p>\n{_fields(body)}"


def _part(name: str, part: dict[str, Any]) -> str:
    told = f"<p>{escape(part['description'])}</p>\n" if "description" in part else ""
    return f'<h3 id="{escape(name)}">{escape(_shown(name))}</h3>\n{told}{_fields(part)}'


def _body(about: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of what a route takes; an empty one for routes that take nothing."""
    content = about.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = _referred(content.get("schema", {}))
    found: dict[str, Any] = schema["components"]["schemas"][name] if name else {}
    return found


def _reached(bodies: list[dict[str, Any]], schema: dict[str, Any]) -> list[str]:
    """The names of all parts that bodies have, in the order in which a reader meets them."""
    names: list[str] = []
    waiting: list[Any] = list(reversed(bodies))
    while waiting:
        part = waiting.pop()
        inner = list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else []
        waiting += reversed(inner)
        if isinstance(part, dict) and (name := _referred(part)) and name not in names:
            names.append(name)
            waiting.append(schema["components"]["schemas"][name])
    return names


def _fields(part: dict[str, Any]) -> str:
    """The table of its fields; nothing where it has none."""
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td>"
        f"<td>{'yes' if name in part.get('required', ()) else ''}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in part.get("properties", {}).items()
    ]
    if not rows:
        return ""
    head = "".join(f"<th scope='col'>{title}</th>" for title in ("field", "type", "required", "meaning"))
    return f'<div class="fields" tabindex="0"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _referred(field: dict[str, Any]) -> str:
    """The name of the part that it refers to, if it does."""
    return str(field.get("$ref", "")).rpartition("/")[2]


def _shown(name: str) -> str:
    """Of two parts with one name the schema has the modules too."""
    return name.rpartition("__")[2]


def _type(field: dict[str, Any]) -> str:
    """HTML, in words: what is optional may always be null, which need not be said."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"] if each.get("type") != "null"))
    if name := _referred(field):
        return f'<a href="#{escape(name)}">{escape(_shown(name))}</a>'
    if "enum" in field or "const" in field:
        return escape(", ".join(map(str, field.get("enum", [field.get("const")]))))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return escape(str(field.get("type", "any")))
