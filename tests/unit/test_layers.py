"""Imports point downwards only, there are no cycles, and the engine's plain-Python parts never reach torch.

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

# Bottom up. A name is a folder, or a module beside the folders: whole folders stand above or below each other.
TIERS = (
    ("errors", "params", "constraint", "config", "types", "budget", "batch", "prefix"),
    ("sampling",),
    ("backends", "kernels"),
    ("models",),
    ("runtime",),
    ("proposers", "control"),
    ("engine", "llm"),
    ("reports",),
    ("audit", "server", "train", "export"),
    ("integrations",),
    ("bench",),
    ("simulate", "plan"),
    ("cli", "__init__", "__main__"),
)
TORCH_FREE = (
    "errors",
    "params",
    "constraint",
    "config",
    "types",
    "prefix",
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


def tier_of(module: str) -> int | None:
    """The tier of `foredraft.x.y`, or None for a module that no tier names."""
    inside = module.removeprefix(ROOT + ".") if module != ROOT else "__init__"
    return next((tier for tier, names in enumerate(TIERS) if inside.partition(".")[0] in names), None)


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
