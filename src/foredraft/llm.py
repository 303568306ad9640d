"""The library: load a model once, then generate, chat and stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count
from threading import RLock
from typing import Any

from foredraft.config import EngineConfig
from foredraft.engine.loading import Progress, load_model
from foredraft.errors import InvalidParameter, InvalidPrompt
from foredraft.models.catalog import DEFAULT_MODEL
from foredraft.outputs import CompletionOutput, RequestOutput, TokenEvent
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec
from foredraft.tool_calls import check_tools

Message = dict[str, Any]
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Prompt = str | list[int] | list[Message]
Params = SamplingParams | list[SamplingParams] | None  # for all prompts, or one for each
Specs = str | list[str] | None  # likewise
DoneProgress = Callable[[int, int], None]


class LLM:
    """A model ready to write: `generate` continues prompts, `chat` answers conversations, `stream` gives tokens as they
    come. For servers there is AsyncEngine over `llm.engine`.

        llm = LLM("smollm2-135m")
        print(llm.chat("Name three rivers.")[0].text)

    Calls may overlap, in several threads too: whoever steps the engine steps it for all, and what is not its own waits
    for its owner.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        spec: str = "auto",
        head: str | None = "auto",
        dtype: str = "auto",
        activations: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        exact: bool = True,
        threads: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        refill: int = 1,
        max_model_len: int | None = None,
        kv_cache_tokens: int | None = None,
        max_chunk_s: float = 0.1,
        block_size: int = 16,
        prefix_caching: bool = True,
        prefix_salt: str = "",
        progress: Progress | None = None,
    ) -> None:
        """Fetch the model if need be, load it, and prove that it is exact. Raises InvalidModel, InvalidParameter or
        InvalidSpec with a sentence; all are ValueErrors.

        model         a catalogue name, a GGUF file, a safetensors folder or a hub id
        spec          speculation of requests that name none: "auto", "off", "ngram:k=6", "ngram+suffix", "auto(…)"
        head          trained heads: "auto" takes those that come with Foredraft for this model, None takes none, and a
                      folder, a GGUF file or a hub id names another
        dtype         "float32", "bfloat16", "int8", "int4", or "auto": as the file has it
        activations   what int8 and int4 weights are multiplied by on a CPU: "int8" or "int16", which is more exact
        device        "cpu", "cuda", or "auto": the best there is
        backend       "native", "torch", "cuda", or "auto"
        exact         a row's bits do not depend on the other rows, so that a text does not depend on its batch mates
        threads       of the CPU; None takes all usable cores
        max_num_seqs  sequences that run at once
        max_num_batched_tokens  rows of one run; None is enough for a chunk of a prompt and for every sequence
        refill        waiting requests run once so many places are free
        max_model_len, kv_cache_tokens  tokens of one sequence, and of all; None is what model and memory allow
        max_chunk_s   about the longest wait of a running stream for a chunk of another request's prompt
        block_size    tokens in a block of the KV cache
        prefix_caching, prefix_salt  prompts that begin alike are computed once; the salt is part of a prefix's name
        progress      called as progress(stage, done, total) while the model is fetched and loaded
        """
        self.model = model
        self.spec = spec
        config = EngineConfig(
            dtype=dtype,
            activations=activations,
            device=device,
            backend=backend,
            exact=exact,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            refill=refill,
            max_model_len=max_model_len,
            kv_cache_tokens=kv_cache_tokens,
            max_chunk_s=max_chunk_s,
            block_size=block_size,
            prefix_caching=prefix_caching,
            prefix_salt=prefix_salt,
            threads=threads,
            head=head,
        )
        loaded = load_model(model, config, parse_spec(spec), progress)
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.config
        self.max_model_len = loaded.max_model_len
        self.backend_name = loaded.backend.name
        self.device = str(loaded.backend.device)
        self.dtype = loaded.dtype
        self.exact_report = loaded.exact_report
        self._request_ids = count()
        self._lock = RLock()  # held by whoever uses the engine
        self._inboxes: dict[str, deque[TokenEvent]] = {}  # events by request, until the call that made it reads them

    def __repr__(self) -> str:
        """What was loaded, with what "auto" has chosen."""
        return (
            f"LLM({self.model!r}, spec={self.spec!r}, dtype={self.dtype!r}, device={self.device!r}, "
            f"backend={self.backend_name!r}, max_model_len={self.max_model_len})"
        )

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: Params = None,
        *,
        spec: Specs = None,
        progress: DoneProgress | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, texts or token ids; outputs keep the order of the inputs."""
        several: Any = [prompts] if _is_one_prompt(prompts) else prompts
        return self._collect(several, params, spec, progress)

    def chat(
        self,
        conversations: str | list[int] | list[Message] | list[str] | list[list[int]] | list[list[Message]],
        params: Params = None,
        *,
        spec: Specs = None,
        tools: list[Tool] | None = None,
        progress: DoneProgress | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many. Each is a list of messages with `role` and `content`, a text that the user
        says, or the token ids of a conversation, which are taken as they are.

        `tools` are functions as OpenAI's clients describe them. The model may call them: `output.tool_calls` has the
        calls, and messages with `tool_calls` and of the role "tool" tell it what came of them."""
        if not isinstance(conversations, str | list) or not conversations:
            raise InvalidPrompt(
                "chat needs a text, token ids, a list of messages, each with a role and a content, or a list of those."
            )
        one = _is_one_prompt(conversations) or isinstance(conversations[0], dict)
        several: list[Any] = [conversations] if one else list(conversations)
        if not all(isinstance(conversation, str | list) and conversation for conversation in several):
            raise InvalidPrompt(
                "Every conversation must be a text, token ids, or a list of messages with a role and a content, and "
                "not empty."
            )
        prompts = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in several]
        return self._collect(prompts, params, spec, progress, tools)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: str | None = None,
        tools: list[Tool] | None = None,
        progress: DoneProgress | None = None,
    ) -> Iterator[TokenEvent]:
        """Tokens of one prompt as they come; a list of messages is a conversation, which may have tools. Closing the
        iterator aborts. `progress` is called after every run with the tokens of the prompt that are computed, and with
        those it has; what it raises ends the request."""
        return self.stream_many([self.encode(prompt, tools)], params, spec=spec, progress=progress)

    def stream_many(
        self,
        prompts: Items[Prompt],
        params: Params = None,
        *,
        spec: Specs = None,
        progress: DoneProgress | None = None,
    ) -> Iterator[TokenEvent]:
        """Tokens of many prompts, interleaved; an event's `request_id` is the index of its prompt. `progress` is as in
        `stream`, over all prompts."""
        encoded = [self.encode(prompt) for prompt in prompts]
        events = self._run(encoded, params, spec, is_followed=True, progress=progress)
        return (event._replace(request_id=str(index)) for index, event in events)

    def as_finished(
        self, prompts: Items[Prompt], params: Params = None, *, spec: Specs = None
    ) -> Iterator[tuple[int, CompletionOutput]]:
        """The outputs of many prompts in the order in which they finish, each with the index of its prompt."""
        encoded = [self.encode(prompt) for prompt in prompts]
        for index, event in self._run(encoded, params, spec, is_followed=False):
            if event.output is not None:
                yield index, event.output

    def encode(self, prompt: Prompt, tools: list[Tool] | None = None) -> list[int]:
        """The token ids of a text, of token ids (as they are) or of a conversation, ready to be answered."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return self.tokenizer.encode_chat(prompt, None if tools is None else check_tools(tools))
        if tools is not None:
            raise InvalidPrompt("tools need a conversation: a list of messages, each with a role and a content.")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return prompt  # type: ignore[return-value]
        raise InvalidPrompt(
            f"A prompt must be a text, a list of token ids or a list of messages, not {type(prompt).__name__}."
        )

    def close(self) -> None:
        """Abort whatever runs."""
        with self._lock:
            self._deliver(self.engine.abort_all())

    def _run(
        self,
        prompts: list[list[int]],
        params: Params,
        spec: Specs,
        is_followed: bool,
        progress: DoneProgress | None = None,
    ) -> Iterator[tuple[int, TokenEvent]]:
        """Events as they come, each with the index of its prompt; only the last of each sample if nobody follows."""
        every_params = _one_each("params", params, SamplingParams(), SamplingParams, len(prompts))
        every_spec = [parse_spec(text) for text in _one_each("spec", spec, self.spec, str, len(prompts))]
        if any(each.adaptive for each in every_spec):
            with self._lock:
                self.engine.speculation.calibrate()
        places = {str(next(self._request_ids)): index for index in range(len(prompts))}
        num_prompt_tokens = sum(map(len, prompts))
        inbox: deque[TokenEvent] = deque()
        try:
            with self._lock:
                for request_id, prompt, each, its_spec in zip(places, prompts, every_params, every_spec, strict=True):
                    self.engine.add(request_id, prompt, each, its_spec, is_followed)
                    self._inboxes[request_id] = inbox
            while True:
                with self._lock:
                    if not inbox and not any(map(self.engine.is_live, places)):
                        break
                    if not inbox:
                        self._step()
                    left = sum(map(self.engine.num_uncomputed_prompt_tokens, places)) if progress else 0
                if progress is not None:
                    progress(num_prompt_tokens - left, num_prompt_tokens)
                while inbox:
                    event = inbox.popleft()
                    index = places[event.request_id]
                    if event.output is not None:
                        read_as = self.tokenizer.answer_format(prompts[index], every_params[index].grammar is not None)
                        event = event._replace(output=replace(event.output, answer_format=read_as))
                    yield index, event
        finally:
            with self._lock:
                for request_id in places:
                    self.engine.abort(request_id)
                    self._inboxes.pop(request_id, None)

    def _step(self) -> None:
        """One step for all calls. If it fails, the caller is told by the exception and the others by their events."""
        try:
            self._deliver(self.engine.step())
        except BaseException as error:
            self._deliver(self.engine.abort_all(error))
            raise

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)

    def _collect(
        self,
        prompts: list[Prompt],
        params: Params,
        spec: Specs,
        progress: DoneProgress | None,
        tools: list[Tool] | None = None,
    ) -> list[RequestOutput]:
        encoded = [self.encode(prompt, tools) for prompt in prompts]
        every_params = _one_each("params", params, SamplingParams(), SamplingParams, len(prompts))
        finished: list[list[CompletionOutput]] = [[] for _ in prompts]
        done = 0
        for index, output in self.as_finished(encoded, every_params, spec=spec):
            finished[index].append(output)
            if len(finished[index]) == every_params[index].n:
                done += 1
                if progress is not None:
                    progress(done, len(prompts))
        return [
            RequestOutput(
                str(index), prompt if isinstance(prompt, str) else None, ids, sorted(outputs, key=lambda o: o.index)
            )
            for index, (prompt, ids, outputs) in enumerate(zip(prompts, encoded, finished, strict=True))
        ]


def _is_one_prompt(prompts: object) -> bool:
    """A text, or a list of token ids; a list of anything else holds several prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, list):
        raise InvalidPrompt(f"prompts must be a text, token ids, or a list of those, not {type(prompts).__name__}.")
    return bool(prompts) and all(isinstance(token, int) for token in prompts)


def _one_each(name: str, given: Any, default: Any, kind: type, count: int) -> list[Any]:
    """One value per prompt, from nothing, one for all, or a list of them."""
    values = given if isinstance(given, list) else [default if given is None else given] * count
    if len(values) != count:
        raise InvalidParameter(f"{name} has {len(values)} entries for {count} prompts; give one for all, or one each.")
    for value in values:
        if not isinstance(value, kind):
            raise InvalidParameter(f"{name} must be a {kind.__name__} or a list of them, not {type(value).__name__}.")
    return values
