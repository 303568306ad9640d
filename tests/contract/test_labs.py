"""The labs run, and they fail when what they teach is broken."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from foredraft.control import economics
from foredraft.sampling import rules
from foredraft.types import Draft
from tests.tiny_models import random_model, save_model

LABS = Path(__file__).parents[2] / "docs" / "labs"
SCRIPTS = sorted(file.name for file in LABS.glob("0*.py"))
WITH_A_MODEL = ("01_ngram.py", "02_model_draft.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


def arguments(script: str, tiny: Path) -> list[str]:
    return ["--small", *(["--model", str(tiny)] if script in WITH_A_MODEL else [])]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_lab_runs_from_beginning_to_end(script: str, tiny: Path) -> None:
    command = [sys.executable, "-W", "error", str(LABS / script), *arguments(script, tiny)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    claims = (LABS / script).read_text().count("check(")
    assert done.stdout.count("\n  checked: ") >= claims >= 3


def test_a_claim_that_does_not_hold_ends_a_lab() -> None:
    command = [sys.executable, "-c", "import lab; lab.check(1 + 1 == 3, 'sums are odd'); print('went on')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=LABS)
    assert (done.returncode, done.stdout) == (1, "")
    assert "sums are odd" in done.stderr


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> Callable[[str], ModuleType]:
    """A lab as a module whose main() runs it."""

    def module(script: str) -> ModuleType:
        monkeypatch.syspath_prepend(LABS)
        monkeypatch.setattr(sys, "argv", [script, *arguments(script, tiny)])
        spec = importlib.util.spec_from_file_location("a_lab", LABS / script)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "a_lab", loaded)
        spec.loader.exec_module(loaded)
        return loaded

    return module


def keeps_every_draft_token(draft: Draft, target: rules.Target, chance: rules.Chance) -> rules.Outcome:
    """The match rule without the match."""
    tokens = list(draft.tokens)
    return list(range(len(tokens))), [*tokens, target.token(len(tokens) - 1, tokens)]


def redraws_from_p(p: Tensor, q: Tensor) -> Tensor:
    return p


def straight_line(alpha: float, k: int) -> float:
    return 1 + alpha * k


def never_zero(
    acceptances: list[float], cost: float, verify: economics.VerifyCost = economics.flat
) -> economics.Length:
    return max(economics.lengths(acceptances, cost, verify)[1:], key=lambda length: length.speedup)


def never_flips(*figures: object, **limits: object) -> None:
    return None


BROKEN = {
    "a rule that keeps every draft token, n-grams": (
        "01_ngram.py", rules.RULES, "match", keeps_every_draft_token, "the engine's text with drafts is that of plain",
    ),
    "a rule that keeps every draft token, a model": (
        "02_model_draft.py", rules.RULES, "match", keeps_every_draft_token, "the drafted text is the plain text",
    ),
    "a rule that keeps every draft token, a table": (
        "03_rejection.py", rules, "match", keeps_every_draft_token, "writes the same text with drafts and without",
    ),
    "a rejection that draws from p": (
        "03_rejection.py", rules, "_residual", redraws_from_p, "rejection: the exact distribution of two tokens",
    ),
    "tokens that grow in a straight line": (
        "04_economics.py", economics, "expected_tokens", straight_line, "dice and formula agree",
    ),
    "a plan that never says 0": (
        "04_economics.py", economics, "best_length", never_zero, "k = 0 is best exactly where",
    ),
    "batches that never flip": (
        "04_economics.py", economics, "flip_batch", never_flips, "no draft is best",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_lab_notices(
    case: str, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, place, name, broken, sentence = BROKEN[case]
    if isinstance(place, dict):
        monkeypatch.setitem(place, name, broken)
    else:
        monkeypatch.setattr(place, name, broken)
    with pytest.raises(SystemExit, match=sentence):
        load(script).main()


def test_the_mixed_workload_notices_a_policy_that_learns_the_wrong_path_round(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = load("04_economics.py")
    learn = lab.Adaptive.learn
    monkeypatch.setattr(lab.Adaptive, "learn", lambda self, accepted, rejected: learn(self, rejected, accepted))
    with pytest.raises(SystemExit, match="adaptive is at least as fast as"):
        lab.mixed_workload(60)


def test_the_index_has_every_lab() -> None:
    assert re.findall(r"^\| \[(\w+\.py)\]\(\1\) ", (LABS / "README.md").read_text(), re.MULTILINE) == SCRIPTS
    assert len(SCRIPTS) == 4
