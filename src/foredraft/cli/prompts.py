"""Where `generate` gets its prompts: the command line, stdin, or a file of JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidPrompt

Message = dict[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | list[Message]  # a text to continue, or a conversation to answer

ALLOWED = '{"prompt": "..."}, {"messages": [...]} or {"turns": ["..."]}'


def gather_prompts(arguments: list[str], file: Path | None) -> list[Prompt]:
    """The arguments, then the file's prompts. "-" stands for all of stdin, and so does giving nothing at all."""
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise InvalidPrompt("Give a prompt, a file with --file, or pipe a text in.")
        arguments = ["-"]
    prompts: list[Prompt] = [_read_stdin() if argument == "-" else argument for argument in arguments]
    if file is not None:
        prompts += read_prompt_file(file)
    return prompts


def as_conversation(prompt: Prompt) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def read_prompt_file(file: Path) -> list[Prompt]:
    """One prompt per line; of Spec-Bench's turns the first. A bad line is named by its number."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: a JSON string may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidPrompt(f"{file} cannot be read: {reason}.") from error
    prompts = [_parse_line(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidPrompt(f"{file} holds no prompts; write one JSON object a line: {ALLOWED}.")
    return prompts


def _parse_line(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidPrompt(f"{where} is not JSON ({error.msg} at column {error.colno}); use {ALLOWED}.") from error
    match record:
        case {"messages": [*messages]} if messages and all(isinstance(message, dict) for message in messages):
            return messages
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]}:
            return prompt
    raise InvalidPrompt(f"{where} holds no prompt; use {ALLOWED}.")


def _read_stdin() -> str:
    """All of stdin, without the newline that `echo` adds."""
    text = sys.stdin.read()
    if not text:
        raise InvalidPrompt("Nothing came in on stdin; give a prompt, a file with --file, or pipe a text in.")
    return text.removesuffix("\n")
