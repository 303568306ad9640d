"""`foredraft generate`: prompts in, texts out. All prompts run at once; answers keep the order of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import answer_record, follow, print_json, say
from foredraft.cli.progress import CountingProgress
from foredraft.errors import InvalidPrompt
from foredraft.outputs import CompletionOutput, TokenEvent
from foredraft.params import SamplingParams
from foredraft.reports.prompts import Prompt, read_prompts


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
        events = llm.stream_many(inputs, params)
        if len(inputs) == 1 and n == 1 and not as_json:
            failed = _report_error(0, follow(events, show=True))
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
            progress.hide()
            failed |= _report_error(index, event.output)
            while printed < total and len(finished[printed]) == n:
                _print_answer(printed, [finished[printed][sample] for sample in range(n)], as_json)
                printed += 1
            progress.show()
    return failed


def _print_answer(index: int, samples: list[CompletionOutput], as_json: bool) -> None:
    if as_json:
        print_json(answer_record(index, samples))
        return
    for sample in samples:
        name = str(index) if len(samples) == 1 else f"{index}.{sample.index}"
        print(f"[{name}]\n{sample.text}\n", flush=True)


def _report_error(index: int, output: CompletionOutput | None) -> bool:
    if output is None or output.error is None:
        return False
    say(f"Prompt {index}: {output.error}")
    return True
