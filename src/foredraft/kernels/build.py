"""Compile the C kernels, once per instruction-set level of this kind of machine: `python -m foredraft.kernels.build`.

Imports nothing but the standard library, so that setup.py can run it before anything is installed. Each level becomes
one shared library; `backends/native/` loads the best one that the processor at hand can run.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).resolve().parent

# No -ffast-math and no contraction: fused multiply-adds stand where the source says so, and nowhere else.
FLAGS = "-std=gnu11 -O3 -fPIC -shared -pthread -ffp-contract=off -fno-math-errno -fno-trapping-math".split()


@dataclass(frozen=True)
class Level:
    """An instruction-set level: its compiler flags, and the processor features that a machine must report to run it."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]

    @property
    def library(self) -> Path:
        return SOURCES / f"libforedraft-{self.name}.so"


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_AMX_FLAGS = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")

# Best first.
LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("amx", ("-march=x86-64-v4", "-mavx512vnni", *_AMX_FLAGS), _AVX512 | {"avx512_vnni"} | _AMX),
        Level("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
        Level("avx512", ("-march=x86-64-v4",), _AVX512),
        Level("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        Level("avx2", ("-march=x86-64-v3",), _AVX2),
        Level("sse4", ("-march=x86-64-v2",), frozenset({"sse4_2", "ssse3", "popcnt"})),
    ),
    "aarch64": (
        # scheduling before register allocation makes GCC spill the sums of the widest tiles
        Level("dotprod", ("-march=armv8.2-a+dotprod+fp16", "-fno-schedule-insns"), frozenset({"asimddp", "asimdhp"})),
        Level("neon", ("-march=armv8-a", "-fno-schedule-insns"), frozenset()),
    ),
}


def levels() -> tuple[Level, ...]:
    """The levels of this kind of machine, best first; none where there are no kernels for it."""
    machine = platform.machine().lower()
    return LEVELS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), ())


def processor_features() -> frozenset[str]:
    """What the processor says it can do, in Linux's words."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset({"asimddp", "asimdhp"})  # every Apple processor that runs macOS
    flags = _cpuinfo("flags", "features")
    return frozenset(flags[0].split()) if flags else frozenset()


def processor_model() -> str:
    """The processor's name; empty where it does not tell."""
    # ARM processors have numbers instead of a name
    return ", ".join(sorted(set(_cpuinfo("model name", "cpu implementer", "cpu part")))) or platform.processor()


def _cpuinfo(*names: str) -> list[str]:
    """What Linux says behind these words of all its processors; nothing on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.lower().startswith(names)]


def sources_digest() -> str:
    """Of what a library is made of: its flags and what its sources say, whatever they are called. The library carries
    the digest, so that one of other sources is noticed."""
    digest = hashlib.sha256(repr((FLAGS, [(level.name, level.flags) for level in levels()])).encode())
    for text in sorted(path.read_bytes() for pattern in ("*.c", "*.h") for path in SOURCES.glob(pattern)):
        digest.update(text)
    return digest.hexdigest()[:16]


def usable_levels() -> list[Level]:
    """The levels that are compiled and that this processor can run, best first."""
    features = processor_features()
    return [level for level in levels() if level.library.exists() and level.features <= features]


def _start(level: Level, pool: Executor, folder: Path) -> list[Future[Path]]:
    """Compile every source of a level to an object in the folder, the longest first."""

    def compiled(source: Path) -> Path:
        target = folder / f"{level.name}-{source.stem}.o"
        _run_compiler([*level.flags, *names, "-c", str(source), "-o", str(target)])
        return target

    names = [f'-DFD_SOURCES="{sources_digest()}"', f"-DFD_BUILD={json.dumps(f'{level.name} {_compiler()}')}"]
    largest_first = sorted(SOURCES.glob("*.c"), key=lambda source: (source.name != "linear.c", source.name))
    return [pool.submit(compiled, source) for source in largest_first]


def _link(level: Level, objects: list[Future[Path]]) -> None:
    unfinished = level.library.with_suffix(f".{os.getpid()}.tmp")
    try:
        _run_compiler([*level.flags, "-o", str(unfinished), *(str(each.result()) for each in objects), "-lm"])
        unfinished.replace(level.library)
    finally:
        unfinished.unlink(missing_ok=True)


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def _run_compiler(arguments: list[str]) -> None:
    subprocess.run([*shlex.split(_compiler()), *FLAGS, *arguments], check=True, capture_output=True, text=True)


def compile_all() -> list[Path]:
    """Compile every level. What fails is left out with one line of warning, and the portable backend remains."""
    libraries: list[Path] = []
    failures: dict[str, str] = {}  # level -> why
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [(level, _start(level, pool, Path(folder))) for level in levels()]
        for level, objects in started:
            try:
                _link(level, objects)
                libraries.append(level.library)
            except OSError as error:
                failures[level.name] = f"the C compiler does not run ({error})"
            except subprocess.CalledProcessError as error:
                lines = str(error.stderr).strip().splitlines() or ["the C compiler gave no reason"]
                failures[level.name] = next((line for line in lines if "error" in line), lines[0])
    if failures:
        reason = next(iter(failures.values()))
        print(f"warning: native kernels were not built for {', '.join(failures)}: {reason}", file=sys.stderr)
    return libraries


if __name__ == "__main__":
    for library in compile_all():
        print(library.name)
