"""A conversation at the command line: its turns, how they are answered, and the /commands that change that."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from foredraft.cli.output import say
from foredraft.errors import ForedraftError
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec
from foredraft.reports.prompts import Message

HELP = """\
/set              show the settings
/set NAME VALUE   change one: /set temperature 0.8, /set max_tokens 1024, /set seed none
/spec [SPEC]      show or change the speculation: off, auto, ngram, ngram+suffix, …
/system [TEXT]    show the system prompt, or start anew with this one
/regen            answer the last question again
/reset            start anew
/save FILE        write the conversation to a file, as one line of JSON
/help             show this
/exit             leave (so does Ctrl-D)
Ctrl-C stops an answer; once more drops it with its question.
Several lines: between \"\"\" and \"\"\", or with \\ at the end of a line."""

# What /set may change; the rest of SamplingParams is for programs.
SETTINGS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "acceptance"),
)
_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


@dataclass
class Conversation:
    """The turns so far, and the system prompt in front of them."""

    model: str
    params: SamplingParams
    spec: str
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    @property
    def is_asked(self) -> bool:
        """Whether the last turn is the user's."""
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    @property
    def is_answered(self) -> bool:
        """Whether the last turn is the model's."""
        return bool(self.turns) and self.turns[-1]["role"] == "assistant"

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the last question, and what there is of its answer."""
        while self.turns and self.turns.pop()["role"] != "user":
            pass

    def obey(self, line: str) -> bool:
        """Carries out a /command. False means: leave."""
        command, _, argument = line.partition(" ")
        argument = argument.strip()
        match command:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/set" if argument:
                self._set(*argument.partition(" ")[::2])
            case "/set":
                say("\n".join(f"{name:<20} {_readable(getattr(self.params, name))}" for name in SETTINGS))
            case "/spec" if argument:
                self._choose_spec(argument)
            case "/spec":
                say(self.spec)
            case "/system" if argument:
                self.system = argument
                self.turns.clear()
                say("A new conversation with this system prompt.")
            case "/system":
                say(self.system or "There is no system prompt.")
            case "/regen" if self.turns:
                self.turns.pop()
                if not self.params.temperature or self.params.seed is not None:
                    say("It may be the same again: /set temperature 0.8 and /set seed none draw another.")
            case "/regen":
                say("There is no answer yet.")
            case "/reset" | "/clear":
                self.turns.clear()
                say("A new conversation.")
            case "/save" if argument:
                self._save(Path(argument).expanduser())
            case "/save":
                say("Say where: /save FILE.")
            case "/help" | "/?":
                say(HELP)
            case _:
                say(f"{command} is not known.\n{HELP}")
        return True

    def _set(self, name: str, text: str) -> None:
        if name not in SETTINGS:
            say(f"There is no setting {name}; there are {', '.join(SETTINGS)}.")
            return
        try:
            self.params = replace(self.params, **{name: _value(name, text.strip())})
        except ForedraftError as error:
            say(str(error))
        else:
            say(f"{name} is {_readable(getattr(self.params, name))} now.")

    def _choose_spec(self, spec: str) -> None:
        try:
            parse_spec(spec)
        except ForedraftError as error:
            say(str(error))
        else:
            self.spec = spec
            say(f"Speculation is {spec} now; the texts stay the same.")

    def _save(self, file: Path) -> None:
        """A line that `foredraft generate --file` reads again."""
        record = {"model": self.model, "spec": self.spec, "messages": self.messages}
        try:
            file.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"{file} cannot be written: {error.strerror}.")
        else:
            say(f"Saved {len(self.turns)} turns in {file}.")


def _value(name: str, text: str) -> Any:
    """A setting as it is typed; "none" is the default."""
    if text.lower() in ("none", "default", ""):
        return _DEFAULTS[name]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _readable(value: Any) -> str:
    return "the default" if value is None or value == () else str(value)
