"""tools/training_prompts.py makes prompts about code out of requests for code, the same ones for the same seed."""

from __future__ import annotations

import ast
import doctest
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = "Write a python function to join two words by a number.\nYour code should pass this test:\nassert {}"
PASSAGE = "Summarize: " + "A river carries stones down to the plain. " * 6  # the other kinds quote four of them
PASSAGES = [f"{PASSAGE}{place}" for place in range(6)]


def made(prompts: list[str], folder: Path) -> list[str]:
    source, out = folder / "prompts.jsonl", folder / "more.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*PASSAGES, *prompts]))
    subprocess.run([sys.executable, ROOT / "tools/training_prompts.py", source, "--out", out], check=True)
    return [json.loads(line)["prompt"] for line in out.read_text(encoding="utf-8").splitlines()]


def test_a_tested_function_is_asked_for_in_three_forms(tmp_path: Path) -> None:
    prompts = made([TESTED.format('join("a", "b",3)=="a3b"')], tmp_path)
    unfinished = [prompt for prompt in prompts if ">>>" in prompt]
    assert len(unfinished) == 3
    for prompt in unfinished:
        code = prompt[prompt.index("def join(") : prompt.rindex('"""') + 3]
        function = ast.parse(code).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert [argument.arg for argument in function.args.args] == ["text", "other", "n"]
        documentation = ast.get_docstring(function) or ""
        assert documentation.startswith("Join two words by a number.")
        example = doctest.DocTestParser().get_examples(documentation)[0]
        assert (example.source, example.want) == ("join('a', 'b', 3)\n", "'a3b'\n")


def test_a_test_without_literals_makes_no_function(tmp_path: Path) -> None:
    tests = ("join(first, 'b', 3) == 'a3b'", "set(join('a', 'b', 3)) == {'a'}", "join('a', 'b' == 'a3b'")
    assert not [prompt for prompt in made([TESTED.format(test) for test in tests], tmp_path) if ">>>" in prompt]


def test_code_is_asked_for_again(tmp_path: Path) -> None:
    general = "Create a Python function that returns the longest word of a sentence.\n\nA small house"
    bound = "Create a Python function that draws a circle with matplotlib."
    prompts = [prompt for prompt in made([general, bound], tmp_path) if not prompt.startswith(("Translate", "Summ"))]
    translated = [prompt for prompt in prompts if "longest word" in prompt and "Python" not in prompt]
    assert len(translated) == 2 and all(prompt.endswith("\n\nA small house") for prompt in translated)
    assert len([prompt for prompt in prompts if "longest word" in prompt and "Python" in prompt]) == 2
    circles = [prompt for prompt in prompts if "circle" in prompt]
    assert len(circles) == 2 and all("Python" in prompt for prompt in circles)


def test_only_python_is_explained(tmp_path: Path) -> None:
    prompts = made([f"Fix this.\n\n{code}" for code in ("def f(x):\n    return x", "def f(x)\n  x\nend")], tmp_path)
    quoted = [prompt for prompt in prompts if "```python\ndef f" in prompt]
    assert len(quoted) == 2 and all("return x\n```" in prompt for prompt in quoted)


def test_the_seed_decides(tmp_path: Path) -> None:
    prompts = [TESTED.format(f"join_{place}('a', 'b', {place}) == 'a{place}b'") for place in range(30)]
    assert made(prompts, tmp_path) == made(prompts, tmp_path)
