"""The command line on a terminal: live output, and what Ctrl-C leaves behind. The model is a stand-in."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
BELL = "\a"
GREEN, MAGENTA = "\x1b[32m", "\x1b[35m"


def start(
    *arguments: str, pause: float = 0.0, stdout: int | None = None, setup: str = ""
) -> tuple[subprocess.Popen[bytes], int]:
    """`foredraft ARGUMENTS...` with the stand-in, on a terminal. Where it is to `pause`, it rings the bell and waits so
    many seconds before each token. `setup` is a line of Python that runs first.

    Ctrl-C is heard even where the tests themselves run in the background, whose children are born deaf to it.
    """
    ring = f"os.write(2, {BELL.encode()!r}), time.sleep({pause})" if pause else "None"
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"import os, sys, time; sys.argv = {['foredraft', *arguments]!r}; sys.path.insert(0, {str(REPOSITORY)!r}); "
        "from tests.unit import fake_llm; sys.modules['foredraft.llm'] = fake_llm.fake_module([]); "
        f"fake_llm.FakeLLM.pause = lambda self: ({ring}); "
        f"{setup}\n"
        "from foredraft.cli.main import run; run()"
    )
    here, there = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdin=there, stdout=stdout or there, stderr=there)
    os.close(there)
    return process, here


def read_until(terminal: int, text: str) -> str:
    """What the terminal shows up to `text`; an empty text stands for the end."""
    seen = ""
    while not text or text not in seen:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # how Linux tells that the other end has closed
            break
        seen += piece.decode(errors="replace")
    return seen


def press_ctrl_c(process: subprocess.Popen[bytes], terminal: int, text: str) -> str:
    """As `read_until`, of a program that is about to read a line and has shown all else. Before it reads, Ctrl-C waits
    for a key, so it is pressed again while nothing is shown."""
    process.send_signal(signal.SIGINT)
    while not select.select([terminal], [], [], 3)[0]:
        process.send_signal(signal.SIGINT)
    return read_until(terminal, text)


def test_demo_is_live_and_ends_with_a_table() -> None:
    process, terminal = start("demo", "--spec", "ngram+suffix")
    seen = read_until(terminal, "")
    assert process.wait() == 0
    assert f"{GREEN}Hello" in seen  # drafted by ngram
    assert f"{MAGENTA} there" in seen  # drafted by suffix
    assert seen.index("speculative") < seen.index("speed-up")
    assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)


@pytest.mark.parametrize("arguments", [["demo"], ["generate", "hi"], ["generate", "one", "two"]])
def test_ctrl_c_leaves_the_terminal_clean(arguments: list[str]) -> None:
    process, terminal = start(*arguments, pause=0.3)
    sign_of_life = "Hello" if arguments == ["generate", "hi"] else HIDE_CURSOR
    seen = read_until(terminal, sign_of_life)
    process.send_signal(signal.SIGINT)
    seen += read_until(terminal, "")
    assert process.wait() == 130
    assert "Traceback" not in seen
    assert seen.rfind(SHOW_CURSOR) >= seen.rfind(HIDE_CURSOR)
    assert seen.endswith("\n") or SHOW_CURSOR in seen


@pytest.mark.parametrize("arguments", [["chat"], ["run", "smollm2"]])
def test_chat_prompts_and_answers(arguments: list[str]) -> None:
    process, terminal = start(*arguments)
    seen = read_until(terminal, "> ")
    os.write(terminal, b"hi\n")
    seen += read_until(terminal, "seed 7")
    os.write(terminal, b"/exit\n")
    seen += read_until(terminal, "")
    assert process.wait() == 0
    assert "Hello there." in seen
    assert "10.0 tok/s" in seen


def test_ctrl_c_stops_an_answer_and_not_the_conversation() -> None:
    process, terminal = start("chat", pause=0.3)
    read_until(terminal, "> ")
    os.write(terminal, b"hi\n")
    read_until(terminal, "Hello")
    process.send_signal(signal.SIGINT)
    seen = read_until(terminal, "> ")
    assert "Stopped; /regen answers again." in seen and "." not in seen.partition("Stopped")[0]
    os.write(terminal, b"again\n")
    read_until(terminal, "seed 7")
    os.write(terminal, b"/exit\n")
    assert "Traceback" not in read_until(terminal, "")
    assert process.wait() == 0


@pytest.mark.parametrize("question", ["hi", "a long one"])
def test_the_first_ctrl_c_says_so_and_the_second_drops_the_answer(question: str) -> None:
    """Before the first token too: "a long one" is computed in chunks."""
    process, terminal = start("chat", pause=1.5)
    read_until(terminal, "> ")
    os.write(terminal, f"{question}\n".encode())
    seen = read_until(terminal, "Hello" if question == "hi" else "Reading the prompt")
    if question == "hi" and BELL not in seen.partition("Hello")[2]:
        read_until(terminal, BELL)  # so that the next token is being computed
    process.send_signal(signal.SIGINT)
    read_until(terminal, "Stopping…")
    process.send_signal(signal.SIGINT)
    assert "Dropped" in read_until(terminal, "> ")
    os.write(terminal, b"/regen\n")
    assert "There is no answer yet." in read_until(terminal, "> ")
    os.write(terminal, b"/exit\n")
    assert "Traceback" not in read_until(terminal, "")
    assert process.wait() == 0


def test_ctrl_c_too_late_for_an_answer_ends_nothing() -> None:
    """It is pressed once the figures of the answer are shown, before the next line is read."""
    late = "from foredraft.cli import chat; show = chat.figures; "
    late += "chat.figures = lambda *a, **b: (show(*a, **b), os.kill(os.getpid(), signal.SIGINT))[0]"
    process, terminal = start("chat", setup=late)
    read_until(terminal, "> ")
    for _ in range(2):
        os.write(terminal, b"hi\n")
        assert "seed 7" in read_until(terminal, "> ")
    os.write(terminal, b"/exit\n")
    assert "Traceback" not in read_until(terminal, "")
    assert process.wait() == 0


def test_ctrl_c_stops_a_long_prompt() -> None:
    process, terminal = start("chat", pause=1.5)
    read_until(terminal, "> ")
    os.write(terminal, b"a long one\n")
    read_until(terminal, "Reading the prompt")
    process.send_signal(signal.SIGINT)
    seen = read_until(terminal, "> ")
    assert "Stopped; /regen answers again." in seen and "Hello" not in seen
    os.write(terminal, b"/exit\n")
    read_until(terminal, "")
    assert process.wait() == 0


def test_ctrl_c_twice_at_the_prompt_leaves() -> None:
    process, terminal = start("chat")
    read_until(terminal, "> ")
    assert "Ctrl-C again" in press_ctrl_c(process, terminal, "> ")
    assert "Traceback" not in press_ctrl_c(process, terminal, "")
    assert process.wait() == 0


def test_one_bar_stays_while_answers_are_printed() -> None:
    process, terminal = start("generate", "one", "two", "three", pause=0.5)
    seen = read_until(terminal, "")
    assert process.wait() == 0
    assert seen.count(HIDE_CURSOR) == 1 and seen.count("Hello there.") == 3
    assert [seen.index(f"[{index}]") for index in range(3)] == sorted(seen.index(f"[{index}]") for index in range(3))


def test_chat_colours_drafts_on_request() -> None:
    process, terminal = start("chat", "--show-drafts", "--spec", "suffix")
    seen = read_until(terminal, "> ")
    os.write(terminal, b"hi\n")
    seen += read_until(terminal, "seed 7")
    os.write(terminal, b"/exit\n")
    seen += read_until(terminal, "")
    assert process.wait() == 0
    assert f"Hello{MAGENTA} there\x1b[39m." in seen
    assert f"{MAGENTA}suffix 1" in seen


def test_what_is_quickly_done_shows_no_bar() -> None:
    process, terminal = start("generate", "one", "two")
    seen = read_until(terminal, "")
    assert process.wait() == 0
    assert "there" in seen and HIDE_CURSOR not in seen and "Generating" not in seen


def test_bars_on_the_terminal_do_not_touch_results_elsewhere() -> None:
    process, terminal = start("generate", "one", "two", "--json", pause=0.4, stdout=subprocess.PIPE)
    seen = read_until(terminal, "")
    assert process.stdout is not None
    with process.stdout:
        records = [json.loads(line) for line in process.stdout]
    assert process.wait() == 0
    assert [record["index"] for record in records] == [0, 1]
    assert "Generating" in seen
    assert "there" not in seen
