"""Draws the picture in README.md: one prompt, plain and speculative, tokens tinted by the proposer that drafted them.

    python tools/picture.py [--record]

A box is one run of the target. `--record` decodes the prompt with the default model and writes docs/images/runs.json;
without it, docs/images/runs.svg is drawn from the runs that were recorded last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RUNS, PICTURE = ROOT / "docs" / "images" / "runs.json", ROOT / "docs" / "images" / "runs.svg"
MODEL, SPEC, MAX_TOKENS = "smollm2-135m", "ngram+suffix", 96
TARGET = "target"

CHARACTER, LINE, MARGIN = 7.6, 23, 18  # width of a character, height of a line, space around everything
STYLE = """
  .page { fill: #ffffff; } .panel { fill: #f6f8fa; stroke: #d0d7de; }
  text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.6px; fill: #1f2328; }
  .title { font-family: system-ui, sans-serif; font-size: 15px; font-weight: 600; }
  .note { font-family: system-ui, sans-serif; font-size: 13px; fill: #59636e; }
  .run { fill: none; stroke: #8c959f; stroke-width: 1; }
  .target { fill: none; } .first { fill: #b6e3c6; } .second { fill: #f6d5a0; } .third { fill: #c9d4f7; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } .panel { fill: #151b23; stroke: #3d444d; }
    text { fill: #f0f6fc; } .note { fill: #9198a1; } .run { stroke: #656c76; }
    .first { fill: #1a5c36; } .second { fill: #75511a; } .third { fill: #34457f; }
  }
"""
TINTS = ("first", "second", "third")

Decoding = dict[str, Any]  # spec, runs, and pieces: [text, origin] of every token


def record() -> dict[str, Any]:
    """Decode the prompt twice, speculatively first, so that no proposer has seen its answer."""
    from foredraft import LLM, SamplingParams, __version__
    from foredraft.cli.demo import PROMPTS

    title, prompt = next(iter(PROMPTS.items()))
    llm = LLM(MODEL, prefix_caching=False)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    decodings, token_ids = {}, []
    for name, spec in (("speculative", SPEC), ("plain", "off")):
        events = list(llm.stream([{"role": "user", "content": prompt}], params, spec=spec))
        output = events[-1].output
        assert output is not None
        token_ids.append(output.token_ids)
        pieces = [[event.text, event.origin] for event in events]
        decodings[name] = {"spec": spec, "runs": output.metrics.target_runs, "pieces": pieces}
    assert token_ids[0] == token_ids[1], "speculation must not change the text"
    return {
        "title": title,
        "model": MODEL,
        "task": prompt.strip().splitlines()[-1],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"foredraft": __version__},
        "command": "python tools/picture.py --record",
        **decodings,
    }


def runs_of(decoding: Decoding) -> Iterator[list[tuple[str, str]]]:
    """The tokens of each run of the target: accepted draft tokens, and then one token of its own. A text may end within
    an accepted path."""
    run: list[tuple[str, str]] = []
    for text, origin in decoding["pieces"]:
        run.append((text, origin))
        if origin == TARGET:
            yield run
            run = []
    if run:
        yield run


class Panel:
    """One text with a box around every run."""

    def __init__(self, top: float, decoding: Decoding, tints: dict[str, str]) -> None:
        self.top = top
        self.column = self.line = 0
        self.boxes: list[str] = []
        self.tinted: list[str] = []
        self.texts: list[str] = []
        for number, run in enumerate(runs_of(decoding)):
            start = self.column
            for text, origin in run:
                for place, part in enumerate(text.split("\n")):
                    if place:
                        self._box(number, start)
                        self.line, self.column = self.line + 1, 0
                        start = 0
                    if part:
                        self._write(part, tints.get(origin, TARGET))
            self._box(number, start)

    @property
    def height(self) -> float:
        return (self.line + 1) * LINE

    def _write(self, part: str, tint: str) -> None:
        x, y = self._place(self.column)
        width = len(part) * CHARACTER
        if tint != TARGET:
            self.tinted.append(
                f'<rect class="{tint}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LINE - 4}"/>'
            )
        shown = part.strip(" ")
        if shown:
            indent = len(part) - len(part.lstrip(" "))
            self.texts.append(
                f'<text x="{x + indent * CHARACTER:.1f}" y="{y + 14:.1f}" textLength="{len(shown) * CHARACTER:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(shown)}</text>'
            )
        self.column += len(part)

    def _box(self, number: int, start: int) -> None:
        """The part of a run that is on this line."""
        if self.column == start:
            return
        x, y = self._place(start)
        width = (self.column - start) * CHARACTER
        self.boxes.append(
            f'<rect class="run" data-run="{number}" x="{x + 0.5:.1f}" y="{y:.1f}" width="{width - 1:.1f}" '
            f'height="{LINE - 4}" rx="3"/>'
        )

    def _place(self, column: int) -> tuple[float, float]:
        return 2 * MARGIN + column * CHARACTER, self.top + self.line * LINE + 2


def draw(recorded: dict[str, Any]) -> str:
    """The picture as the text of an SVG file. It fetches nothing, and follows the reader's light or dark mode."""
    origins = [origin for _, origin in recorded["speculative"]["pieces"] if origin != TARGET]
    tints = dict(zip(dict.fromkeys(origins), TINTS, strict=False))
    tokens = len(recorded["plain"]["pieces"])
    plain_runs, runs = recorded["plain"]["runs"], recorded["speculative"]["runs"]
    longest = max(map(len, "".join(text for text, _ in recorded["plain"]["pieces"]).split("\n")))
    width = longest * CHARACTER + 4 * MARGIN
    task = escape(recorded["task"])
    top = MARGIN + 8
    body = [f'<text class="note" x="{MARGIN}" y="{top}">{escape(recorded["model"])}, greedy: “{task}”</text>']
    for name, title, note in (
        ("plain", "Plain decoding: every box is one run of the model", f"{plain_runs} runs for {tokens} tokens"),
        (
            "speculative",
            f"Speculative decoding ({recorded['speculative']['spec']}): the same text",
            f"{runs} runs for the same {tokens} tokens, {tokens / runs:.2f} tokens per run",
        ),
    ):
        body.append(f'<text class="title" x="{MARGIN}" y="{top + 30:.1f}">{escape(title)}</text>')
        panel = Panel(top + 50, recorded[name], tints)
        body.append(
            f'<rect class="panel" x="{MARGIN}" y="{top + 40:.1f}" width="{width - 2 * MARGIN:.1f}" '
            f'height="{panel.height + 18:.1f}" rx="6"/>'
        )
        body += [*panel.tinted, *panel.boxes, *panel.texts]
        top += panel.height + 82
        body.append(f'<text class="note" x="{MARGIN}" y="{top - 4:.1f}">{escape(note)}</text>')
    x = float(MARGIN)
    top += 26
    for label, tint in (*tints.items(), (TARGET, TARGET)):
        caption = "the model's own token" if label == TARGET else f"drafted by {label}"
        body.append(f'<rect class="{tint}" x="{x:.1f}" y="{top - 15:.1f}" width="16" height="13"/>')
        body.append(f'<rect class="run" x="{x:.1f}" y="{top - 15:.1f}" width="16" height="13" rx="3"/>')
        body.append(f'<text class="note" x="{x + 22:.1f}" y="{top - 4:.1f}">{escape(caption)}</text>')
        x += len(caption) * 7 + 50
    height = top + MARGIN
    description = f"The same {tokens} tokens: {plain_runs} runs of the model plain, {runs} runs with drafts."
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(description)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        *body,
        "</svg>",
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="decode the prompt again")
    if parser.parse_args().record:
        RUNS.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(json.loads(RUNS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
