"""Runs in the environment of litellm: a conversation with the server as each of the providers that fit it, as one line
of JSON.

Usage: litellm_talks.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]

HELLO = [{"role": "user", "content": "hello there"}]
GREEDY = {"messages": HELLO, "temperature": 0, "max_tokens": 10}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = {
    "messages": HELLO,
    "max_tokens": 100,
    "tools": [{"type": "function", "function": {"name": "now", "parameters": NOTHING}}],
    "tool_choice": "required",
}


def main() -> None:
    url, model = sys.argv[1:]
    told: dict[str, Any] = {}
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("ollama_chat", url)):
        options = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", **GREEDY}
        whole = litellm.completion(**options)
        parts = litellm.completion(**options, stream=True)
        told[provider] = {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
            "tokens": whole.usage.completion_tokens,
        }
    anthropic = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", **GREEDY}
    told["anthropic"] = {"whole": litellm.completion(**anthropic).choices[0].message.content}
    called = litellm.completion(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", **CALL)
    told["call"] = called.choices[0].message.tool_calls[0].function.name
    try:
        litellm.completion(model="openai/another", api_base=f"{url}/v1", api_key="none", num_retries=0, **GREEDY)
    except litellm.NotFoundError as error:
        told["refused"] = str(error)
    print(json.dumps(told))


main()
