"""Hypothesis on shared machines: the same examples every time, and no clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("repeatable")
