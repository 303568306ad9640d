"""Which speculation strings requests may use, where one process serves people who do not own it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from foredraft.errors import InvalidSpec
from foredraft.proposers.registry import ProposerChoice, Spec, needs_whole_draft, parse_spec, read_options


class AllowedSpecs:
    """The specs that the owner of a server allows; `off` always is.

    An entry allows itself. An entry of one proposer allows it joined with other allowed ones and under `auto(…)`, too.
    Without options it allows all options that are numbers, but under the controller: what requests choose themselves is
    verified only where that pays, because all others wait for it. An option that is text may name a file or a hub id,
    and one that is `owner_only` outlives the request. A request may use such a one only where an entry has the same
    proposer with the very same options.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises InvalidSpec for an entry that is no spec."""
        self.entries = tuple(dict.fromkeys(("off", *entries)))
        specs = [parse_spec(entry) for entry in self.entries]
        self._specs = {_canonical(spec) for spec in specs}
        self._choices = {str(spec.choices[0]) for spec in specs if len(spec.choices) == 1 and not spec.adaptive}

    def check(self, text: object) -> Spec:
        """The spec under which a request runs; raises InvalidSpec if it names none, or none that is allowed."""
        spec = parse_spec(text)
        if _canonical(spec) in self._specs:
            return spec
        own = [choice for choice in spec.choices if str(choice) not in self._choices]
        if not spec.choices or spec.with_head or not all(map(self._allows_options, own)):
            raise InvalidSpec(f"spec={text!r} is not allowed here; allowed are {', '.join(self.entries)}.")
        if own and any(map(needs_whole_draft, spec.choices)):
            raise InvalidSpec(
                f"spec={text!r} has options of its own, so the controller decides about it, but one of its proposers "
                f"needs its whole draft verified; allowed as they stand are {', '.join(self.entries)}."
            )
        return replace(spec, adaptive=spec.adaptive or bool(own))

    def _allows_options(self, choice: ProposerChoice) -> bool:
        """Whether a request may give a proposer these options, which no entry has."""
        options = read_options(choice)
        are_numbers = all(isinstance(getattr(options, name), int | float) for name in choice.options)
        outlive = choice.options.keys() & getattr(options, "owner_only", ())
        return choice.name in self._choices and are_numbers and not outlive


def _canonical(spec: Spec) -> tuple[tuple[str, ...], bool, bool]:
    """The same for specs that differ only in the order of options."""
    return tuple(map(str, spec.choices)), spec.adaptive, spec.with_head
