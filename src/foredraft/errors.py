"""Every error a user can cause. All are ValueErrors whose message says what was wrong, what is allowed and what to
do."""

from __future__ import annotations


class ForedraftError(ValueError):
    """Base class: the message is one sentence meant for a person."""


class InvalidParameter(ForedraftError):
    """A sampling parameter, engine option or command-line value is out of range or of the wrong type."""


class InvalidPrompt(ForedraftError):
    """A prompt is empty, too long, not text, or holds token ids that the model does not have."""


class InvalidModel(ForedraftError):
    """A model file, folder or name cannot be used; the message names the file and the tensor or field."""


class InvalidSpec(ForedraftError):
    """A speculation string cannot be parsed or names a proposer that does not exist."""


class Overloaded(ForedraftError):
    """Too many requests wait already; the same request may be taken later."""
