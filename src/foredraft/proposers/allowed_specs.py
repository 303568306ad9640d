"""Which speculation strings requests may use, where one process serves people who do not own it."""

from __future__ import annotations

from collections.abc import Iterable

from foredraft.errors import InvalidSpec
from foredraft.proposers.registry import ProposerChoice, Spec, parse_spec, read_options


class AllowedSpecs:
    """The specs that the owner of a server allows; `off` always is.

    An entry allows itself. An entry of one proposer allows it joined with other allowed ones and under `auto(…)`, too.
    Without options it allows all options that are numbers. An option that is text may name a file or a hub id, so a
    request may use one only where an entry has the same proposer with the very same options.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises InvalidSpec for an entry that is no spec."""
        self.entries = tuple(dict.fromkeys(("off", *entries)))
        specs = [parse_spec(entry) for entry in self.entries]
        self._specs = {_canonical(spec) for spec in specs}
        self._choices = {str(spec.choices[0]) for spec in specs if len(spec.choices) == 1 and not spec.adaptive}

    def check(self, text: object) -> Spec:
        """The spec that a request asks for; raises InvalidSpec if it is none, or none that is allowed."""
        spec = parse_spec(text)
        is_joined = spec.choices and not spec.with_head and all(map(self._allows, spec.choices))
        if is_joined or _canonical(spec) in self._specs:
            return spec
        raise InvalidSpec(f"spec={text!r} is not allowed here; allowed are {', '.join(self.entries)}.")

    def _allows(self, choice: ProposerChoice) -> bool:
        if str(choice) in self._choices:
            return True
        options = read_options(choice)
        are_numbers = all(isinstance(getattr(options, name), int | float) for name in choice.options)
        return choice.name in self._choices and are_numbers


def _canonical(spec: Spec) -> tuple[tuple[str, ...], bool, bool]:
    """The same for specs that differ only in the order of options."""
    return tuple(map(str, spec.choices)), spec.adaptive, spec.with_head
