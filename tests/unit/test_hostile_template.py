"""Chat templates that take all time or memory: the conversation is refused, and nothing else notices."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from foredraft.errors import InvalidPrompt
from foredraft.models import chat_template
from foredraft.models.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
BAD = [{"role": "user", "content": "bad"}]
NINES = "{% set n = 8 + messages | length %}{{ n ** (n ** n) }}"  # a number that is never done

HOSTILE = {
    "power": NINES,
    "power of constants": "{{ 9 ** (9 ** 9) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "long string": "{{ 'a' * 40000000 }}",
    "longer string": "{{ 'a' * 20000000000 }}",
    "width": "{{ '%20000000000d' | format(1) }}",
    "doubling": "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "filters": "{{ range(99999) | map('string') | map('center', 99999) | join | length }}",
    "date": "{{ strftime_now('%Y' * 1000000000) | length }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long error": "{{ raise_exception('a' * 10000000) }}",
}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that templates have started. A test whose template is not ended fails after a minute."""
    processes: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **options))
        return processes[-1]

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    timer = threading.Timer(60, lambda: [process.kill() for process in processes])
    timer.start()
    yield processes
    timer.cancel()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(f"{{% if messages[0].content == 'bad' %}}{HOSTILE[case]}{{% endif %}}good", {})
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.5)
    with pytest.raises(InvalidPrompt, match="The model's chat template refused these messages: ") as error:
        template.render(BAD, True)
    assert len(str(error.value)) < 700 and "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["power", "loops"])
def test_the_next_conversation_is_rendered(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(f"{{% if messages[0].content == 'bad' %}}{HOSTILE[case]}{{% endif %}}good", {})
    with monkeypatch.context() as patched, pytest.raises(InvalidPrompt, match="it took too long"):
        patched.setattr(chat_template, "MAX_RENDER_S", 0.5)
        template.render(BAD, True)
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 600.0)
    assert template.render(HELLO, True) == "good"


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the text that it makes is short, and where the system has more."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_BYTES", 1 << 28)
    template = ChatTemplate("{{ ('a' * (messages[0].content | int)) | length }}", {})
    with pytest.raises(InvalidPrompt, match="it needs more than 256 MiB of memory"):
        template.render([{"role": "user", "content": str(1 << 28)}], True)
    assert template.render([{"role": "user", "content": "1000"}], True) == "1000"


def test_others_are_rendered_beside_it(started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the interpreter's lock and without the worker that is busy."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 600.0)
    template = ChatTemplate("{% if messages[0].content == 'bad' %}" + NINES + "{% endif %}good", {})
    refusals: list[str] = []

    def hostile() -> None:
        try:
            template.render(BAD, True)
        except InvalidPrompt as error:
            refusals.append(str(error))

    thread = threading.Thread(target=hostile)
    thread.start()
    while not started:
        thread.join(0.01)
    (busy,) = started
    assert template.render(HELLO, True) == "good" and not refusals
    busy.kill()
    thread.join()
    assert refusals == ["The model's chat template refused these messages: its process ended."]


def test_one_worker_serves_many_conversations(started: list[subprocess.Popen[bytes]]) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ raise_exception('no') if messages | length > 1 }}", {})
    for _ in range(5):
        assert template.render(HELLO, True) == "hello" and not template.takes_tools
        with pytest.raises(InvalidPrompt, match="refused these messages: no"):
            template.render(HELLO * 2, True)
    assert len(started) == 1
    started[0].kill()
    started[0].wait()
    assert template.render(HELLO, True) == "hello", "a worker that was ended while it was idle is replaced"
    assert len(started) == 2


def test_workers_are_few(started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_WORKERS", 2)
    template = ChatTemplate("{{ messages[0].content }}", {})
    threads = [threading.Thread(target=template.render, args=(HELLO, True)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(started) <= 2


def test_a_worker_can_be_started_before_it_is_needed(started: list[subprocess.Popen[bytes]]) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert not started
    template.warm()
    assert len(started) == 1
    assert template.render(HELLO, True) == "hello"
    assert len(started) == 1


def test_a_worker_ends_with_its_template_and_with_its_input(started: list[subprocess.Popen[bytes]]) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render(HELLO, True)
    assert os.getsid(started[0].pid) != os.getsid(0), "Ctrl-C is for the process that started it"
    del template
    assert started[0].returncode is not None
    other = ChatTemplate("{{ messages[0].content }}", {})
    other.render(HELLO, True)
    assert started[1].stdin is not None
    started[1].stdin.close()  # as the system does it when the process that started it is killed
    assert started[1].wait() == 0


def test_an_interrupted_answer_is_never_that_of_the_next(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render(HELLO, True)
    send = chat_template._Worker._send

    def interrupted(worker: Any, value: Any) -> None:
        send(worker, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(chat_template._Worker, "_send", interrupted)
        template.render([{"role": "user", "content": "first"}], True)
    assert template.render([{"role": "user", "content": "second"}], True) == "second"
    assert started[0].returncode is not None and len(started) == 2


def test_a_forked_process_has_workers_of_its_own(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render(HELLO, True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        assert template.render(HELLO, True) == "hello"
        assert len(started) == 2 and started[0].stdin is not None and started[0].stdin.closed
        assert started[0].returncode is None, "its parent ends it"
        del template
    started[0].wait()


@pytest.mark.parametrize("text", ["", "a\nb\r\n\u2028", "é世界🌍", "lone \ud800", '"\\ \x00 </script>', "x" * 300_000])
def test_every_text_comes_back_as_it_was(text: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": text}], True) == text
