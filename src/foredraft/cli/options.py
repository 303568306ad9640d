"""The options that several commands share, and what they add up to: an LLM that is open while a command runs."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.progress import loading_progress
from foredraft.config import EngineConfig
from foredraft.models.catalog import DEFAULT_MODEL, check_name
from foredraft.proposers.registry import parse_spec

if TYPE_CHECKING:
    from foredraft.llm import LLM

Model = Annotated[str, typer.Option(help="A catalogue name, a GGUF file, a safetensors folder or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, everything else on stderr.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, int8, int4, or auto: as the file has it.")]
Device = Annotated[str, typer.Option(help="Where to run; auto picks the best there is.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all usable cores when not given.")]
Head = Annotated[str, typer.Option(help="Trained heads: auto, none, or the folder, GGUF file or hub id of a head.")]

MaxTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; the model's own setting when not given.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this fraction of the likeliest one.")]
Seed = Annotated[int | None, typer.Option(help="Repeats a text; drawn and reported when not given.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be given several times.")]


class ModelOptions:
    """Which model to open, and how: `engine` are fields of EngineConfig, None for the default of each. Whatever can be
    refused before torch is imported, which takes seconds, is refused when this is made."""

    def __init__(self, model: str = DEFAULT_MODEL, spec: str = "auto", head: str = "auto", **engine: Any) -> None:
        self.model = model
        self.spec = spec
        self._engine = {name: value for name, value in engine.items() if value is not None}
        self._engine["head"] = None if head == "none" else head
        EngineConfig(**self._engine)
        parse_spec(spec)
        check_name(model)
        if head not in ("auto", "none"):
            check_name(head, "head")

    @contextmanager
    def open(self) -> Iterator[LLM]:
        """The LLM, closed at the end; shows on stderr how fetching and loading go when that is a terminal."""
        with loading_progress() as progress, _without_collections():
            from foredraft.llm import LLM  # takes a second or two

            llm = LLM(self.model, spec=self.spec, progress=progress, **self._engine)
        gc.freeze()  # a full collection would go through all of torch, which takes 90 ms in the middle of a request
        try:
            yield llm
        finally:
            gc.unfreeze()
            llm.close()


@contextmanager
def _without_collections() -> Iterator[None]:
    """What is imported and loaded stays: to look for garbage among it takes a tenth of the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Opening = partial[ModelOptions]  # ModelOptions with what the command line says; what a command sets can be added

# By parameter of ModelOptions; --help shows the first two before a command's own options, and the others behind them.
_DECLARED = {
    "model": Model,
    "spec": Annotated[str, typer.Option(help="Speculation: off, auto, ngram, ngram:k=6, ngram+suffix, ...")],
    "dtype": Dtype,
    "activations": Annotated[
        str, typer.Option(help="int8, int16, or auto: int8. What int8 and int4 weights are multiplied by.")
    ],
    "device": Device,
    "threads": Threads,
    "head": Head,
    "exact": Annotated[
        bool, typer.Option("--exact/--no-exact", help="Bits that do not depend on batch mates, chunks or drafts.")
    ],
}
_DEFAULTS = {"model": DEFAULT_MODEL, "spec": "auto"}


def opens_model(
    *names: str, takes_model: Any = Model, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options beside --model, and those whose default is another for this command. Its parameter
    `opening` gets them. `takes_model` declares the model otherwise than as an option."""
    declared = {**_DECLARED, "model": takes_model}
    given = {field.name: field.default for field in fields(EngineConfig)} | _DEFAULTS | defaults
    chosen = [name for name in _DECLARED if name == "model" or name in names or name in defaults]

    def place(option: inspect.Parameter) -> int:
        return 0 if option.name in _DEFAULTS else 2 if option.name in chosen else 3 if option.name == "as_json" else 1

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            opening = partial(ModelOptions, **{name: values.pop(name) for name in chosen})
            command(opening=opening, **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [inspect.Parameter(name, keyword, default=given[name], annotation=declared[name]) for name in chosen]
        own = [each.replace(kind=keyword) for each in inspect.signature(command, eval_str=True).parameters.values()]
        every = sorted((each for each in (*shared, *own) if each.name != "opening"), key=place)
        called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in every}
        return called

    return decorate
