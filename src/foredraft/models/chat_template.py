"""Chat templates: the model's own Jinja template, rendered in processes that can be ended (template_worker.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from foredraft.errors import InvalidPrompt
from foredraft.models import template_worker

Message = Mapping[str, Any]
MAX_RENDER_S = 10.0
MAX_RENDER_BYTES = 1 << 30  # of memory, where the system limits it
MAX_WORKERS = 4  # of a template: one slow conversation does not hold up the others


class ChatTemplate:
    """A template; `special_tokens` (bos_token, eos_token, ...) are variables of it. Threads may render at the same
    time. Workers are started when they are needed, and end with the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._variables = {"documents": None, **special_tokens}
        self._owner = 0  # the process that the workers belong to
        self._own_workers()

    def _own_workers(self) -> None:
        """In a process that was forked, the workers are those of its parent."""
        if self._owner != os.getpid():
            self._free = threading.BoundedSemaphore(MAX_WORKERS)
            self._idle: list[_Worker] = []  # the one used last is at the end
            self._owner = os.getpid()

    def warm(self) -> None:
        """Start a worker, and do not wait for it: the first conversation will find it ready."""
        self._own_workers()
        self._idle.append(self._worker())

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return bool(self._ask(None)["takes_tools"])

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`variables` are further ones that the template may read. Raises InvalidPrompt when the template refuses the
        conversation, or takes too much time or memory."""
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return str(self._ask({**(variables or {}), **conversation})["text"])

    def _ask(self, conversation: dict[str, Any] | None) -> dict[str, Any]:
        self._own_workers()
        with self._free:
            worker = self._idle_worker() or self._worker()
            try:
                answer = worker.answer(conversation)
            except BaseException:  # for instance a KeyboardInterrupt: the worker's answer is still to come
                worker.end()
                raise
            if answer is not None:
                self._idle.append(worker)
            else:
                took_too_long = worker.end() == -signal.SIGALRM
                answer = {"refused": "it took too long" if took_too_long else "its process ended"}
        if "refused" in answer:
            raise InvalidPrompt(f"The model's chat template refused these messages: {answer['refused']}.")
        return answer

    def _idle_worker(self) -> _Worker | None:
        while self._idle:
            with suppress(IndexError):  # another thread was faster
                worker = self._idle.pop()
                if worker.is_alive():
                    return worker
        return None

    def _worker(self) -> _Worker:
        setup = template_worker.Setup(
            path=list(map(str, sys.path)),
            seconds=MAX_RENDER_S,
            memory_bytes=MAX_RENDER_BYTES,
            source=self._source,
            variables=self._variables,
        )
        return _Worker(setup)


class _Worker:
    """A running template_worker.py."""

    def __init__(self, setup: template_worker.Setup) -> None:
        # Without `site`, since it is told the path. In a session of its own it gets no Ctrl-C: it ends with its input.
        command = [sys.executable, "-P", "-S", template_worker.__file__]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True)
        self.end = weakref.finalize(self, _end, self._process, os.getpid())
        with suppress(BrokenPipeError):  # `answer` will tell
            self._send(setup)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, conversation: dict[str, Any] | None) -> dict[str, Any] | None:
        """None if the process has ended."""
        assert self._process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            self._send(conversation)
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return answer

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        line = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()


def _end(process: subprocess.Popen[bytes], owner: int) -> int | None:
    """End a worker, unless this is a fork of the process that owns it; returns its exit status."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was to be written has no reader
            pipe.close()
    if owner != os.getpid():
        return None
    process.kill()
    return process.wait()


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The conversation with each content as one string; raises InvalidPrompt for anything that is not a conversation.

    Content may be a string or OpenAI's list of `{"type": "text", "text": ...}` parts, which are joined by newlines.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidPrompt(
            "A conversation must be a list of at least one message like {'role': 'user', 'content': '...'}."
        )
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidPrompt(
                f"Message {index} must be a dict with a 'role' such as 'system', 'user' or 'assistant'."
            )
        content = message.get("content")
        is_call = content is None and bool(message.get("tool_calls"))  # nothing but calls
        checked.append({**message, "content": "" if is_call else _text(content, index)})
    return checked


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            return "\n".join(texts)
    raise InvalidPrompt(
        f"Message {index} must have a string 'content', or a list of parts like {{'type': 'text', 'text': '...'}}."
    )
