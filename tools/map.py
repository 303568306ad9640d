"""Writes docs/map.md: the files of the package, each with the first sentence of its docstring.

    python tools/map.py [--check]

Folders come in the order in which one explains the engine, and files within a folder in the order in which they build
on each other. `--check` writes nothing and exits 1 where the page is not what the docstrings say.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, PAGE = ROOT / "src" / "foredraft", ROOT / "docs" / "map.md"

FIRST = {
    "types.py": "the nouns: what a `Sequence` has computed and committed, a `Draft` as a tree of nodes, a `Commit`",
    "engine/step.py": "the verbs in their order: schedule, propose, run, keep, commit (`update_from_output`), observe",
    "proposers/base.py": "what a proposer must do, and what it may say of itself",
    "proposers/ngram.py": "a whole proposer: its options and a chain; the index behind it is in `occurrences.py`",
    "proposers/registry.py": "where its name is written, and how `ngram:k=6` becomes its options",
}

# A folder that is not named here comes last.
FOLDERS = (
    "", "engine", "proposers", "proposers/model", "control", "sampling", "runtime", "models", "models/gguf",
    "models/safetensors", "heads", "heads/formats",
    "heads/eagle", "heads/medusa", "heads/dflash", "heads/mtp", "heads/draft_model", "backends", "backends/native",
    "backends/cuda", "kernels", "server", "integrations", "integrations/ray_serve", "cli", "plan", "bench", "audit",
    "simulate", "reports", "train",
)  # fmt: skip

INTRODUCTION = """\
# Map of the code

`python tools/map.py` writes this page from the docstrings: change it there. A request enters through `llm.py` or
`engine/async_engine.py`, waits in the scheduler, and runs in steps until it ends. In every step proposers draft, the
controller cuts, the target runs all rows at once, and a rule accepts. [design.md](design.md) explains why it is so."""

BEFORE_FIRST = """\
## Five files to read first

In this order. After them you can write a proposer; [adding-a-proposer.md](adding-a-proposer.md) has the steps."""

BEFORE_LAYERS = """\
## Layers

An import points to the same line or downwards, never up. `tests/unit/test_layers.py` enforces it, and also which files
are plain Python without torch: the scheduler, the block pool, speculation and control can be read and run without a
model."""

BEFORE_FOLDERS = """\
## Folder by folder

Within a folder, a file builds only on files above it and on folders that its layer may use."""


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence; a paragraph that leads to an example ends with a colon."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]
    return sentence.removesuffix(".").removesuffix(":").replace("|", "\\|")


def about(file: Path) -> str:
    """The first sentence of a file's docstring, or of the comment that a C file begins with."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    comment = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
    return first_sentence(re.sub(r"^ \* ?", "", comment.group(1), flags=re.MULTILINE)) if comment else ""


def imports(file: Path) -> set[Path]:
    """The modules of the package that a file names, wherever the import stands."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        places = [PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names]
        found |= {place for place in places if place.exists()}
    return found


def in_order(files: list[Path]) -> Iterator[Path]:
    """Files after those that they build on, else by name."""
    needs = {file: imports(file) & set(files) - {file} for file in files if file.suffix == ".py"}
    waiting = sorted(needs)
    done: set[Path] = set()
    while waiting:
        file = next((file for file in waiting if needs[file] <= done), waiting[0])
        waiting.remove(file)
        done.add(file)
        yield file
    yield from sorted(file for file in files if file.suffix != ".py")


def folders() -> list[str]:
    """All folders with code, those of FOLDERS first."""
    found = {file.parent.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
    names = {"" if name == "." else name for name in found}
    return [name for name in FOLDERS if name in names] + sorted(names - set(FOLDERS))


def section(folder: str) -> str:
    place = PACKAGE / folder
    files = [
        file
        for file in place.iterdir()
        if file.suffix in (".py", ".c", ".h") and not (file.name == "__init__.py" and folder)
    ]
    head = f"### {folder or 'foredraft'}/"
    opening = about(place / "__init__.py") if folder and (place / "__init__.py").exists() else ""
    if not files:
        return f"{head}\n\n{opening}."
    table = ["| file | what it is |", "|---|---|", *(f"| `{file.name}` | {about(file)} |" for file in in_order(files))]
    return "\n\n".join([head, *([f"{opening}."] if opening else []), "\n".join(table)])


def layers() -> str:
    """The tiers of the layer test, from the top."""
    tree = ast.parse((ROOT / "tests/unit/test_layers.py").read_text(encoding="utf-8"))
    (tiers,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "TIERS" for target in node.targets)
    )
    there = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in PACKAGE.rglob("*.py")}
    shown = [[name for name in tier if name in there and "__" not in name] for tier in reversed(tiers)]
    return "\n".join(["```", *("   ".join(tier) for tier in shown), "```"])


def beside(folder: str) -> str:
    rows = [f"| `{file.name}` | {about(file)} |" for file in sorted((ROOT / folder).glob("*.py"))]
    return "\n".join([f"| {folder}/ | what it is |", "|---|---|", *rows])


def page() -> str:
    first = [
        f"{place}. [`{name}`](../src/foredraft/{name}): {why}." for place, (name, why) in enumerate(FIRST.items(), 1)
    ]
    missing = [name for name in FIRST if not (PACKAGE / name).exists()]
    assert not missing, f"the page begins with files that are not there: {missing}"
    parts = [
        INTRODUCTION,
        BEFORE_FIRST,
        "\n".join(first),
        BEFORE_LAYERS,
        layers(),
        BEFORE_FOLDERS,
        *map(section, folders()),
        "## Beside the package",
        beside("benchmarks"),
        beside("tools"),
        "`tests/` has a folder by what a test needs: `unit` and `contract` nothing but Python, `native` a C compiler,\n"
        "`server` clients, `gpu` a device, `page` a browser, `peers` other engines, `tokens` the ids of llama.cpp.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is stale")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/map.md is not what the docstrings say; run: python tools/map.py")
        sys.exit(1)


if __name__ == "__main__":
    main()
