"""Imports point downwards only, there are no cycles, serving never imports training, and the engine's plain-Python
parts never reach torch.

Imports inside functions and under TYPE_CHECKING count for layers and cycles: what a module knows about is what matters.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ROOT = "foredraft"
PROPOSING_HEADS = sorted(file.parent.name for file in (SOURCE / ROOT / "heads").glob("*/propose.py"))

# Bottom up. A name is a folder, or a module beside the folders: whole folders stand above or below each other.
TIERS = (
    ("errors", "params", "constraint", "config", "tool_calls", "answers", "types", "outputs", "batch", "prefix"),
    ("sampling",),
    ("backends", "kernels"),
    ("models",),
    ("heads",),
    ("runtime",),
    ("proposers", "control"),
    ("engine", "llm"),
    ("reports",),
    ("audit", "server", "train"),
    ("integrations",),
    ("bench",),
    ("simulate", "plan"),
    ("cli", "__init__", "__main__"),
)
# The files of heads by what they are for, in every kind's folder and above it; the others are the tier of heads itself.
HEAD_FILES = {
    "propose": "proposers",
    "module": "train",
    "train": "train",
    "rounding": "train",
    "export": "train",
}
TRAINS = ("train", "cli")  # who may import training: itself, and the command, when it runs
TORCH_FREE = (
    "errors",
    "params",
    "constraint",
    "config",
    "tool_calls",
    "answers",
    "types",
    "outputs",
    "prefix",
    "heads.kinds",
    "heads.engines",
    "engine.blocks",
    "engine.chunks",
    "engine.scheduler",
    "engine.speculation",
    "control",
    "simulate.step_mode",
    "simulate.event_mode",
)
BRINGS_TORCH = ("torch", "transformers", "accelerate", "safetensors.torch")


@dataclass(frozen=True)
class Import:
    """`importer` names `imported`; both are dotted names. A type-only import does not happen when the program runs."""

    importer: str
    imported: str
    type_only: bool


def fits(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def room_of(module: str) -> str:
    """The name in TIERS to which `foredraft.x.y` belongs."""
    inside = module.removeprefix(ROOT + ".") if module != ROOT else "__init__"
    room, _, file = inside.partition(".")
    return HEAD_FILES.get(file.rpartition(".")[2], room) if room == "heads" else room


def tier_of(module: str) -> int | None:
    """Its tier, or None for a module that no tier names."""
    return next((tier for tier, names in enumerate(TIERS) if room_of(module) in names), None)


def read_package(source: Path) -> dict[str, str]:
    """The text of every module of the package, by dotted name."""
    modules = {}
    for file in sorted((source / ROOT).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(encoding="utf-8")
    return modules


def imports_of(importer: str, text: str, modules: dict[str, str]) -> Iterator[Import]:
    """Every import in the text, wherever it stands. `from package import module` is an import of the module."""

    def visit(node: ast.AST, type_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, type_only)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{importer} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                inside = fits(node.module, ROOT)
                yield Import(importer, name if name in modules or not inside else node.module, type_only)
        guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, type_only or (guard and field == "body"))

    yield from visit(ast.parse(text), False)


def all_imports(modules: dict[str, str]) -> list[Import]:
    return [found for name, text in modules.items() for found in imports_of(name, text, modules)]


def upward_imports(modules: dict[str, str]) -> list[str]:
    """Modules without a tier, and imports from a tier above one's own."""
    problems = [f"{module} belongs to no tier" for module in modules if tier_of(module) is None]
    for found in all_imports(modules):
        mine, theirs = tier_of(found.importer), tier_of(found.imported)
        if fits(found.imported, ROOT) and mine is not None and theirs is not None and theirs > mine:
            problems.append(f"{found.importer} imports {found.imported} from a tier above")
    return problems


def imports_of_training(modules: dict[str, str]) -> list[str]:
    """Imports of training by what is no part of it."""
    return [
        f"{found.importer} imports {found.imported}, which trains"
        for found in all_imports(modules)
        if fits(found.imported, ROOT) and room_of(found.imported) == "train" and room_of(found.importer) not in TRAINS
    ]


def import_cycles(modules: dict[str, str]) -> list[str]:
    """One line per import that closes a cycle."""
    edges: dict[str, list[str]] = {module: [] for module in modules}
    for found in all_imports(modules):
        if found.imported in edges:
            edges[found.importer].append(found.imported)
    problems: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            problems.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for imported in edges[module]:
                visit(imported, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return problems


def paths_to_torch(modules: dict[str, str]) -> list[str]:
    """How each module that must be plain Python reaches torch, if it does. Importing a.b.c also runs a and a.b."""
    runtime: dict[str, set[str]] = {module: set() for module in modules}
    for found in all_imports(modules):
        if not found.type_only:
            runtime[found.importer].add(found.imported)
    for module in modules:
        if "." in module:
            runtime[module].add(module.rpartition(".")[0])

    def search(module: str, path: tuple[str, ...]) -> str | None:
        path = (*path, module)
        if any(fits(module, heavy) for heavy in BRINGS_TORCH):
            return " -> ".join(path)
        onward = (search(imported, path) for imported in sorted(runtime.get(module, ())) if imported not in path)
        return next((problem for problem in onward if problem), None)

    plain = [module for module in modules if any(fits(module, f"{ROOT}.{name}") for name in TORCH_FREE)]
    return [problem for module in plain if (problem := search(module, ()))]


def test_imports_point_downwards() -> None:
    assert upward_imports(read_package(SOURCE)) == []


def test_serving_never_imports_training() -> None:
    assert imports_of_training(read_package(SOURCE)) == []


def test_serving_loads_without_training() -> None:
    """The same, asked of Python itself: what a table of names imports is not seen by reading."""
    serving = (
        "llm",
        "server.app",
        "proposers.staged",
        "heads.catalog",
        *(f"heads.{kind}.propose" for kind in PROPOSING_HEADS),
    )
    program = f"import sys\nimport {', '.join(f'{ROOT}.{name}' for name in serving)}\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    loaded = [name for name in ran.stdout.split() if fits(name, ROOT)]
    assert f"{ROOT}.heads.eagle.propose" in loaded
    assert [name for name in loaded if room_of(name) == "train"] == []


def test_imports_form_no_cycle() -> None:
    assert import_cycles(read_package(SOURCE)) == []


def test_plain_python_modules_never_reach_torch() -> None:
    assert paths_to_torch(read_package(SOURCE)) == []


def test_plain_python_modules_load_without_torch() -> None:
    """The same, asked of Python itself, so that an import that the reading above cannot see is caught too."""
    plain = [module for module in read_package(SOURCE) if any(fits(module, f"{ROOT}.{name}") for name in TORCH_FREE)]
    assert plain, "the package was not found"
    program = f"import sys\nimport {', '.join(plain)}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}).returncode == 0


class TestTheChecksThemselves:
    """A check that cannot fail is no check: each must find what is wrong in a small made-up package."""

    GOOD = {
        "foredraft": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foredraft.llm import LLM",
        "foredraft.types": "",
        "foredraft.engine": "",
        "foredraft.batch": "import torch\nfrom foredraft import types",
        "foredraft.engine.scheduler": "from foredraft.types import Draft\nfrom foredraft.engine import blocks",
        "foredraft.engine.blocks": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        "foredraft.llm": "from foredraft import batch\nfrom foredraft.engine import scheduler",
        "foredraft.cli.main": "def f():\n    from foredraft.llm import LLM",
    }

    def test_a_sound_package_passes(self) -> None:
        assert upward_imports(self.GOOD) == []
        assert import_cycles(self.GOOD) == []
        assert paths_to_torch(self.GOOD) == []

    @pytest.mark.parametrize(
        "statement",
        [
            "from foredraft.llm import LLM",
            "import foredraft.llm",
            "from foredraft import llm",
            "def f():\n    from foredraft.engine import scheduler",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foredraft.runtime.runner import Runner",
        ],
    )
    def test_an_upward_import_is_found(self, statement: str) -> None:
        assert upward_imports({**self.GOOD, "foredraft.batch": statement, "foredraft.runtime.runner": ""})

    @pytest.mark.parametrize("importer", ["llm", "server.app", "heads.eagle.serve", "heads.eagle.propose"])
    def test_an_import_of_training_is_found(self, importer: str) -> None:
        """Wherever it stands: a file of a head is known by its name."""
        package = {**self.GOOD, "foredraft.heads.eagle.train": "", "foredraft.heads.eagle.serve": ""}
        assert imports_of_training(package) == []
        statement = "def f():\n    from foredraft.heads.eagle import train"
        assert imports_of_training({**package, f"foredraft.{importer}": statement})

    def test_a_proposer_may_import_what_serves_its_head_but_not_the_other_way_round(self) -> None:
        package = {**self.GOOD, "foredraft.heads.eagle.serve": "", "foredraft.heads.eagle.propose": ""}
        assert not upward_imports(
            {**package, "foredraft.heads.eagle.propose": "from foredraft.heads.eagle import serve"}
        )
        assert upward_imports({**package, "foredraft.heads.eagle.serve": "from foredraft.heads.eagle import propose"})

    def test_a_module_without_a_tier_is_found(self) -> None:
        assert upward_imports({**self.GOOD, "foredraft.helpers": ""}) == ["foredraft.helpers belongs to no tier"]

    def test_a_cycle_is_found_even_inside_functions(self) -> None:
        blocks = "def f():\n    from foredraft.engine import scheduler"
        assert import_cycles({**self.GOOD, "foredraft.engine.blocks": blocks})

    @pytest.mark.parametrize(
        "broken",
        [
            {"foredraft.types": "import torch.nn"},
            {"foredraft.engine.blocks": "def f():\n    from torch import Tensor"},
            {"foredraft.engine.blocks": "from foredraft.batch import ForwardBatch"},
            {"foredraft.engine": "from foredraft import batch"},
            {"foredraft.engine.scheduler": "from safetensors import torch"},
        ],
    )
    def test_a_path_to_torch_is_found(self, broken: dict[str, str]) -> None:
        assert paths_to_torch({**self.GOOD, **broken})
