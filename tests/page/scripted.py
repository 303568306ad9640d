"""Answers that a test writes itself, as the server streams them. With these the page needs no model."""

from __future__ import annotations

import json
from typing import Any

from tests.page.open_page import OpenPage

CHAT = "**/v1/chat/completions"


def step(tokens: list[tuple[str, str]], draft: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """One run: the emitted tokens with their origins, of which all but the last were drafted if no draft is given."""
    chain = tokens[:-1]
    written = draft or {
        "tokens": [text for text, _ in chain],
        "parents": list(range(-1, len(chain) - 1)),
        "scores": [round(0.9 / (place + 1), 4) for place in range(len(chain))],
        "origins": [origin for _, origin in chain],
    }
    given = [{"id": 7, "text": text, "origin": origin} for text, origin in tokens]
    accepted = fields.pop("accepted", list(range(len(chain))))
    reasons = fields.pop("reasons", ["suffix: drafted", "drafted"])
    return {"tokens": given, "draft": written, "accepted": accepted, "reasons": reasons, **fields}


def steps_of(text: str, size: int = 4, origin: str = "suffix") -> list[dict[str, Any]]:
    """Tokens of `size` characters, three a run: two that were drafted, and the target's own."""
    tokens = [text[at : at + size] for at in range(0, len(text), size)]
    runs = [tokens[at : at + 3] for at in range(0, len(tokens), 3)]
    return [step([*((token, origin) for token in run[:-1]), (run[-1], "target")]) for run in runs]


def stream_of(steps: list[dict[str, Any]], finish: str = "stop", thoughts: list[dict[str, Any]] | None = None) -> str:
    """The events of a streamed chat completion. The trace also has the mark between `thoughts` and the answer."""
    chunks: list[dict[str, Any]] = []
    for each in thoughts or []:
        content = "".join(token["text"] for token in each["tokens"])
        choice = {"index": 0, "delta": {"reasoning_content": content}, "finish_reason": None}
        chunks.append({"choices": [{**choice, "speculation_trace": [each]}]})
    if thoughts:
        mark = step([("</think>\n\n", "target")])
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": None, "speculation_trace": [mark]}]})
    for each in steps:
        content = "".join(token["text"] for token in each["tokens"])
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": None, "speculation_trace": [each]}
        chunks.append({"choices": [choice]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish, "seed": 5}]})
    chunks.append({"choices": [], "metrics": {"speculative_decoding": {"time_saved_s": 0.25}}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(page: OpenPage, *streams: str) -> list[dict[str, Any]]:
    """The next requests are answered with these streams, the last one again and again. Returns the requests' bodies, as
    they come."""
    sent: list[dict[str, Any]] = []

    def handle(route: Any) -> None:
        sent.append(route.request.post_data_json)
        body = streams[min(len(sent), len(streams)) - 1]
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.tab.unroute(CHAT)
    page.tab.route(CHAT, handle)
    return sent


def answer_in_time(page: OpenPage, plain: tuple[str, int], spec: tuple[str, int]) -> None:
    """Races end as the test says: each run is streamed event by event, with so many milliseconds between them."""
    events = [[f"{event}\n\n" for event in stream.split("\n\n") if event] for stream, _ in (plain, spec)]
    page.tab.evaluate(
        """([events, pauses]) => {
            const send = window.fetch;
            const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
            window.fetch = (path, options) => {
                if (!String(path).endsWith("/chat/completions")) return send(path, options);
                const lane = JSON.parse(options.body).spec === "off" ? 0 : 1;
                const encoder = new TextEncoder();
                const body = new ReadableStream({
                    async start(stream) {
                        for (const event of events[lane]) {
                            await pause(pauses[lane]);
                            stream.enqueue(encoder.encode(event));
                        }
                        stream.close();
                    },
                });
                const headers = { "content-type": "text/event-stream" };
                return Promise.resolve(new Response(body, { status: 200, headers }));
            };
        }""",
        [events, [plain[1], spec[1]]],
    )


def answer_without_end(page: OpenPage, stream: str, events: int, pause_ms: int = 0) -> None:
    """The next answers have so many events of the stream, with so many milliseconds between them, and stay open."""
    page.tab.evaluate(
        """([events, pauseMs]) => {
            const send = window.fetch;
            window.fetch = (path, options) => {
                if (!String(path).endsWith("/chat/completions")) return send(path, options);
                const encoder = new TextEncoder();
                const body = new ReadableStream({
                    async start(stream) {
                        options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
                        for (const event of events) {
                            stream.enqueue(encoder.encode(event));
                            await new Promise((resolve) => setTimeout(resolve, pauseMs));
                        }
                    },
                });
                return Promise.resolve(new Response(body, { status: 200 }));
            };
        }""",
        [[f"{event}\n\n" for event in stream.split("\n\n")[:events]], pause_ms],
    )
