"""Where `generate` gets its prompts: the command line, stdin, or a file of JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from foredraft.audit.json_lines import read_json_lines
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
    return [_prompt(record, where) for where, record in read_json_lines(file, ALLOWED)]


def _prompt(record: Any, where: str) -> Prompt:
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
