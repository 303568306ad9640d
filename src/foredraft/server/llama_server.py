"""/infill, /props and /slots: what editors ask llama.cpp's server for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.control.economics import quotient
from foredraft.outputs import CompletionOutput
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.errors import ApiError, error_object, json_response
from foredraft.server.fields import GenerationRequest, check_at_most
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.service import Served
from foredraft.server.sse import event, respond
from foredraft.server.status import VERSION

PATH = "/infill"
router = APIRouter()
posts = APIRouter(route_class=BodyRoute)


class ExtraFile(RequestModel):
    filename: str | None = None
    text: str


class InfillRequest(GenerationRequest):
    input_prefix: str
    input_suffix: str
    input_extra: Many[ExtraFile] | None = None
    prompt: str | None = None  # how the filling begins
    n_predict: int | None = None  # with 0 an editor has the prompt computed ahead: the answer is empty
    seed: int | None = None
    stop: Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None


@posts.post(PATH)
async def infill(body: InfillRequest, request: Request, service: Served) -> Response:
    """Fill the gap between two texts, for models that have tokens for it."""
    check_at_most(service.limits.max_prompts, "input_extra", body.input_extra)
    files = [(each.filename or "file", each.text) for each in body.input_extra or ()]
    prompt, ends = service.fill_in(body.input_prefix, body.input_suffix, files, body.prompt or "")
    wanted = 1 if body.n_predict == 0 else body.n_predict
    others: dict[str, Any] = {"stop_token_ids": [*(body.stop_token_ids or ()), *ends]}
    if body.repeat_penalty is not None:
        others["repetition_penalty"] = body.repeat_penalty
    params = body.sampling_params(service, wanted, **others)
    generation = await begin(service, request, body, [prompt], params)
    return await respond(
        generation, InfillAnswer(generation, service.name, body.n_predict != 0), service.limits, body.stream
    )


@router.get("/props")
async def props(service: Served) -> Response:
    """What editors want to know before they send anything."""
    llm = service.llm
    return json_response(
        {
            "default_generation_settings": {"n_ctx": llm.max_model_len, "speculative": llm.spec != "off", "params": {}},
            "total_slots": llm.engine.scheduler.max_num_seqs,
            "model_path": service.name,
            "model_alias": service.name,
            "chat_template": llm.tokenizer.chat_template or "",
            "modalities": {"vision": False, "audio": False},
            "fills_in": service.fills_in,
            "build_info": f"foredraft {VERSION}",
        }
    )


@router.get("/slots")
async def slots(service: Served) -> Response:
    """The places for sequences, and which of them are taken: what runs in them is nobody's business."""
    running, llm = service.engine.stats().running, service.llm
    speculative = llm.spec != "off"
    places = range(llm.engine.scheduler.max_num_seqs)
    return json_response(
        [
            {"id": place, "n_ctx": llm.max_model_len, "speculative": speculative, "is_processing": place < running}
            for place in places
        ]
    )


class InfillAnswer:
    """A generation as llama.cpp's server writes it: `content`, and figures once it has stopped."""

    def __init__(self, generation: Generation, model: str, has_content: bool) -> None:
        self._generation = generation
        self._model = model
        self._has_content = has_content

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        return self._stopped(output, output.text if self._has_content else "")

    def begin(self) -> bytes:
        return b""

    def delta(self, tokens: Tokens) -> bytes:
        text = "".join([token.text for its in tokens.values() for token in its])
        return event({"content": text, "stop": False}) if text and self._has_content else b""

    def end(self) -> bytes:
        (output,) = self._generation.outputs.values()
        return event(self._stopped(output, ""))

    def failure(self, error: ApiError) -> bytes:
        return event(error_object(PATH, error))

    def _stopped(self, output: CompletionOutput, content: str) -> dict[str, Any]:
        usage, metrics = reports.usage(self._generation), output.metrics
        first_s, later_s = metrics.time_to_first_token_s, metrics.total_time_s - metrics.time_to_first_token_s
        is_word = isinstance(output.stop_reason, str)
        return {
            "content": content,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
            "stop_type": "limit" if output.finish_reason == "length" else "word" if is_word else "eos",
            "stopping_word": output.stop_reason if is_word else "",
            "timings": {
                "prompt_n": usage["prompt_tokens"],
                "prompt_ms": 1000 * first_s,
                "prompt_per_second": quotient(usage["prompt_tokens"], first_s),
                "predicted_n": usage["completion_tokens"],
                "predicted_ms": 1000 * later_s,
                "predicted_per_second": quotient(usage["completion_tokens"], later_s),
                "draft_n": metrics.drafted_tokens,
                "draft_n_accepted": metrics.accepted_tokens,
            },
            "seed": output.seed,
            "metrics": reports.metrics(self._generation),
        }


router.include_router(posts)
