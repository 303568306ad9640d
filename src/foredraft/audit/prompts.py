"""The prompts that come with an audit: a few of different kinds."""

from __future__ import annotations

from pathlib import Path

from foredraft.reports.prompts import read_suite

BUILT_IN = tuple(read_suite(Path(__file__).with_name("prompts.jsonl")))
