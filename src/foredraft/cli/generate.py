"""`foredraft generate`: prompts in, texts out. All prompts run at once; answers keep the order of the prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import answer_record, follow, say
from foredraft.cli.progress import PROMPT, CountingProgress, until_first
from foredraft.errors import InvalidPrompt

if TYPE_CHECKING:
    from foredraft.outputs import CompletionOutput, TokenEvent
    from foredraft.reports.prompts import Prompt


@options.opens_model("spec", "dtype", "activations", "device", "threads", "head", "exact")
def generate(
    opening: options.Opening,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to continue; - is stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSON lines with "prompt", "messages", or Spec-Bench "turns".')
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the prompts as a user, in the model's chat template.")
    ] = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: this many alternatives.")] = None,
    n: Annotated[int, typer.Option(help="How many samples of each prompt.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Continue prompts, or answer them with --chat."""
    from foredraft.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        logprobs=logprobs,
        n=n,
    )
    inputs = _gathered(prompts or [], file)
    if chat:
        inputs = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in inputs]

    with opening().open() as llm:
        stream = partial(llm.stream_many, inputs, params)
        events = until_first(PROMPT, lambda progress: stream(progress=progress)) if len(inputs) == 1 else stream()
        if len(inputs) == 1 and n == 1 and not as_json:
            failed = _report_error(follow(events, show=True), 0, say)
        else:
            failed = _print_in_order(events, len(inputs), n, as_json)
    if failed:
        raise typer.Exit(1)


def _gathered(arguments: list[str], file: Path | None) -> list[Prompt]:
    """The arguments, then the file's prompts. "-" stands for all of stdin, and so does giving nothing at all."""
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise InvalidPrompt("Give a prompt, a file with --file, or pipe a text in.")
        arguments = ["-"]
    prompts: list[Prompt] = [_read_stdin() if argument == "-" else argument for argument in arguments]
    if file is not None:
        from foredraft.reports.prompts import read_prompts

        prompts += read_prompts(file)
    return prompts


def _read_stdin() -> str:
    """All of stdin, without the newline that `echo` adds."""
    text = sys.stdin.read()
    if not text:
        raise InvalidPrompt("Nothing came in on stdin; give a prompt, a file with --file, or pipe a text in.")
    return text.removesuffix("\n")


def _print_in_order(events: Iterator[TokenEvent], total: int, n: int, as_json: bool) -> bool:
    """Prints each answer once it and all before it are finished. Says whether any failed."""
    finished: list[dict[int, CompletionOutput]] = [{} for _ in range(total)]
    printed = 0
    failed = False
    with CountingProgress("Generating", total) as progress:
        for event in events:
            if event.output is None:
                continue
            index = int(event.request_id)
            finished[index][event.index] = event.output
            if len(finished[index]) == n:
                progress.tick()
            failed |= _report_error(event.output, index, partial(progress.print, file=sys.stderr))
            while printed < total and len(finished[printed]) == n:
                samples = [finished[printed][sample] for sample in range(n)]
                progress.print(_record_line(printed, samples) if as_json else _titled(printed, samples))
                printed += 1
    return failed


def _record_line(index: int, samples: list[CompletionOutput]) -> str:
    return json.dumps(answer_record(index, samples), ensure_ascii=False)


def _titled(index: int, samples: list[CompletionOutput]) -> str:
    names = [str(index)] if len(samples) == 1 else [f"{index}.{sample.index}" for sample in samples]
    return "\n".join(f"[{name}]\n{sample.text}\n" for name, sample in zip(names, samples, strict=True))


def _report_error(output: CompletionOutput | None, index: int, report: Callable[[str], None]) -> bool:
    if output is None or output.error is None:
        return False
    report(f"Prompt {index}: {output.error}")
    return True
