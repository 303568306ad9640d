"""A request that fails, by its logits or by its text, ends alone: others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.batch import PackedBatch
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec
from foredraft.runtime.runner import ForwardOutput, Runner
from tests.contract.test_engine import GREEDY, PROMPT, is_idle, with_fields
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=8, kv_cache_tokens=1024)


class Poisoned(Runner):
    """A runner whose model goes wrong for texts that begin with one token, after a few good steps."""

    poison = 200

    def __init__(self, healthy: Runner) -> None:
        super().__init__(healthy.decoder, healthy.backend, healthy.kv)
        self.bad_starts: set[int] = set()  # slots that hold the first token of such a text

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> ForwardOutput:
        output, run = super().forward(batch), batch.tensors()
        self.bad_starts.update(run.slots[(run.positions == 0) & (run.token_ids == self.poison)].tolist())
        rows = range(run.num_rows) if batch.logit_rows is None else batch.logit_rows
        for index, row in enumerate(rows):
            if int(run.key_slots[row, 0]) in self.bad_starts and int(run.positions[row]) > 8:
                output.logits[index] = torch.nan
        return output


def test_nan_logits_end_only_their_own_request(llm: LLM) -> None:
    prompts = [[1, 2, 3], [Poisoned.poison, 2, 3], [4, 5, 6]]
    healthy = llm.generate(prompts, GREEDY)
    llm.engine.scheduler.pool.prefix_caching = False  # so that the poisoned text is computed anew, from its first token
    llm.engine.runner = Poisoned(llm.engine.runner)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "not finite" in (outputs[1].error or "")
    assert outputs[0].token_ids == healthy[0].token_ids
    assert outputs[2].token_ids == healthy[2].token_ids
    assert outputs[1].token_ids == healthy[1].token_ids[: len(outputs[1].token_ids)]
    assert is_idle(llm)


class Breaks:
    """A tokenizer that cannot decode."""

    def text_of(self, token: int) -> str | None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise RuntimeError("no such piece")


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_logits_that_penalties_make_infinite_end_only_their_own_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rule: str, spec: str
) -> None:
    """The model's own logits are finite, if only just; a penalty of one half doubles them."""
    run_layers = llm.engine.runner.forward

    @torch.inference_mode()
    def forward(batch: PackedBatch) -> ForwardOutput:
        output = run_layers(batch)
        output.logits[:, 5] = 3e38
        return output

    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    params = [with_fields(acceptance=rule, temperature=0.8, seed=3, repetition_penalty=each) for each in (0.5, 1.0)]
    bad, good = llm.generate([PROMPT, PROMPT], params, spec=spec)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error == (
        "The penalties or the logit bias made logits that are not finite numbers; this request was ended, others go on."
    )
    assert (good.finish_reason, good.token_ids) == ("length", [5] * 12)
    assert is_idle(llm)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-6, "top_p": 0.5, "min_p": 0.1, "top_k": 5}, {"repetition_penalty": 0.01}], ids=str
)
def test_the_smallest_parameters_give_finite_numbers(llm: LLM, rule: str, fields: dict[str, Any]) -> None:
    (output,) = llm.generate([PROMPT], with_fields(acceptance=rule, logprobs=1, **{"temperature": 0.5, **fields}))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)
    if "top_p" in fields:
        assert output.token_ids == llm.generate([PROMPT], GREEDY)[0].token_ids, "so low, only the likeliest is drawn"


def add_undecodable(llm: LLM, params: SamplingParams) -> None:
    """Add the request "bad", whose tokens cannot be decoded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llm.engine, "tokenizer", Breaks())
        llm.engine.add("bad", PROMPT, params, Spec())


def test_text_that_cannot_be_finished_ends_only_its_own_request(llm: LLM) -> None:
    """The decoder fails when the text is over: on its end-of-text token, which is not decoded itself."""
    first = llm.generate([PROMPT], GREEDY)[0].token_ids[0]
    llm.engine.eos_token_ids = frozenset([first])
    add_undecodable(llm, with_fields(ignore_eos=False))
    llm.engine.add("good", [4, 5, 6], GREEDY, Spec())
    last = {}
    while llm.engine.has_work:
        last.update({e.request_id: e for e in llm.engine.step() if e.finish_reason})
    assert {name: event.finish_reason for name, event in last.items()} == {"bad": "error", "good": "length"}
    assert last["bad"].output is not None
    assert last["bad"].output.error == "The text of this request could not be decoded: no such piece"
    assert is_idle(llm)


def test_text_that_cannot_be_decoded_can_be_aborted(llm: LLM) -> None:
    add_undecodable(llm, GREEDY)
    assert [event.finish_reason for event in llm.engine.abort("bad")] == ["abort"]
    assert is_idle(llm)


def test_text_that_cannot_be_decoded_ends_only_its_own_request(llm: LLM) -> None:
    llm.engine.add("good", PROMPT, GREEDY, Spec())
    add_undecodable(llm, GREEDY)
    reasons = {}
    while llm.engine.has_work:
        reasons.update({e.request_id: e.finish_reason for e in llm.engine.step() if e.finish_reason})
    assert reasons == {"bad": "error", "good": "length"}
    assert is_idle(llm)
