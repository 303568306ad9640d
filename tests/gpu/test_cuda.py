"""Both backends on a CUDA device: the same logits, the same exactness, the same text under random trees."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from foredraft.errors import InvalidParameter
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice, Spec
from tests.contract.test_trees import PROMPTS, RandomTrees, run
from tests.tiny_models import ARCHITECTURES, VOCAB, all_logits, random_model, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("backend", ["torch", "cuda"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = random_model(name)
    folder = save_model(model, tmp_path)
    for length in (1, 17, 300):
        prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            expected = model(prompt[None]).logits[0]
        assert (all_logits(folder, prompt.tolist(), backend, "cuda") - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_drafts_and_batches_do_not_change_the_text(dtype: str, temperature: float, tmp_path: Path) -> None:
    folder = save_model(random_model("qwen3"), tmp_path)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=11, logprobs=2, ignore_eos=True, top_k=40)

    def llm(**options: int) -> LLM:
        return LLM(str(folder), dtype=dtype, device="cuda", **options)

    plain = run(llm(), params, Spec())
    alone = [llm().generate([prompt], params)[0] for prompt in PROMPTS[:2]]
    texts = {tuple(prompt): output.token_ids for prompt, output in zip(PROMPTS, plain, strict=True)}
    proposer = RandomTrees(texts, seed=1)
    speculation = llm(kv_cache_tokens=256, max_num_seqs=5)
    speculation.engine.speculation.assignments.install(ProposerChoice(proposer.name), proposer)
    drafted = run(speculation, params, Spec((ProposerChoice(proposer.name),)))
    for one, off in zip(alone, plain, strict=False):
        assert (one.token_ids, one.logprobs) == (off.token_ids, off.logprobs)
    for on, off in zip(drafted, plain, strict=True):
        assert (on.token_ids, on.logprobs) == (off.token_ids, off.logprobs)
    assert sum(output.metrics.accepted_tokens for output in drafted) > 60


def test_noise_is_that_of_the_cpu() -> None:
    from foredraft.sampling.noise import gumbel, stream_key, uniform

    ids = torch.arange(50_000)
    key = stream_key(7, 3)
    assert torch.equal(gumbel(uniform(key, ids)), gumbel(uniform(key, ids.cuda())).cpu())


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss"])
def test_no_request_waits_for_a_graph_or_the_compiler(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    from foredraft.backends.cuda import graphs, sample

    model = random_model(name)
    model.config.max_position_embeddings = 1024
    llm = LLM(str(save_model(model, tmp_path)), device="cuda", dtype="bfloat16", spec="off", max_model_len=600)
    for module in (graphs, sample):
        monkeypatch.setattr(module, "capture", lambda *arguments: pytest.fail("a graph was captured for a request"))
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *arguments: pytest.fail(f"{arguments[0]} was compiled"))
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
    prompts = [
        [1 + (7 * place + index) % (VOCAB - 1) for place in range(size)]
        for index, size in enumerate((3, 60, 129, 257, 303, 520))
    ]
    for prompt in prompts:
        llm.generate([prompt], params, spec="off")
    for spec in ("off", "ngram:k=8", "suffix"):
        llm.generate(prompts, params, spec=spec)


def test_tokens_move_in_all_caches_at_once() -> None:
    """Also where a slot is both read and written, and with graphs that have been used before."""
    from foredraft.backends.base import move
    from foredraft.backends.cuda.graphs import Moves

    caches = [torch.randn(6, 200, 3, 8), torch.randn(1, 200, 40)]
    on_device, moves = [cache.cuda() for cache in caches], Moves(torch.device("cuda"))
    rng = random.Random(4)
    for count in (1, 3, 4, 9, 2, 70, 3):
        pairs = list(zip(rng.sample(range(200), count), rng.sample(range(200), count), strict=True))
        move(caches, torch.tensor(pairs).T)
        moves.move(on_device, pairs)
        torch.cuda.synchronize()
        assert all(torch.equal(cache, moved.cpu()) for cache, moved in zip(caches, on_device, strict=True)), count


def test_the_garbage_collector_waits_while_a_graph_is_captured() -> None:
    """It may find another graph, whose end in the middle of a capture ends the process."""
    from foredraft.backends.cuda.graphs import capture

    x, was_enabled = torch.zeros(4, device="cuda"), list[bool]()

    def run() -> torch.Tensor:
        was_enabled.append(gc.isenabled())
        return x + 1

    graph, result = capture(x.device, run)
    graph.replay()
    assert result.tolist() == [1.0] * 4
    assert was_enabled == [True, False], "first it is run, then captured"
    assert gc.isenabled()


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_sampled_drafts_are_judged(acceptance: str, tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True, acceptance=acceptance)
    outputs = LLM(str(folder), device="cuda").generate(PROMPTS[:2], params, spec="early_exit:k=3")
    assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert sum(output.metrics.drafted_tokens for output in outputs) > 20


def test_text_is_the_same_across_key_buckets(tmp_path: Path) -> None:
    """Trees that reach beyond 512 keys while their paths do not."""
    folder = save_model(random_model("llama"), tmp_path)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True)
    prompts = [[7, 8, 9, 10] * 120, [7, 8, 9] * 160]
    llm = LLM(str(folder), device="cuda", dtype="bfloat16")
    plain = llm.generate(prompts, params, spec="off")
    for spec in ("suffix:min_n=1", "lookahead", "early_exit:k=4,width=3"):
        assert [o.token_ids for o in llm.generate(prompts, params, spec=spec)] == [o.token_ids for o in plain], spec


def test_a_cache_that_does_not_fit_is_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    with pytest.raises(InvalidParameter, match=r"has memory for \d+ tokens left; set kv_cache_tokens to fewer"):
        LLM(str(folder), device="cuda", kv_cache_tokens=10**12)


@pytest.mark.parametrize("backend", ["torch", "cuda"])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9}]
)
def test_answers_fit_their_grammars(fields: dict[str, float], backend: str, tmp_path: Path) -> None:
    """Rows under a grammar beside rows without one, in one run. Top-k asks for more tokens than are allowed."""
    for package in ("llguidance", "jsonschema"):
        pytest.importorskip(package, reason=f"needs {package}")
    from tests.contract.test_grammars import check_answers
    from tests.grammars import SCHEMAS

    llm = LLM(str(save_model(random_model("llama"), tmp_path)), device="cuda", backend=backend, max_num_seqs=64)
    params = [
        SamplingParams(max_tokens=120, seed=index, grammar=schema, **fields)  # type: ignore[arg-type]
        for index, schema in enumerate(SCHEMAS.values())
    ]
    params.append(SamplingParams(max_tokens=120, seed=7, **fields))  # type: ignore[arg-type]
    prompts = [[5, 6, 7 + index] for index in range(len(params))]
    plain = llm.generate(prompts, params, spec="off")
    check_answers(plain[:-1])
    for spec in ("ngram+suffix+grammar", "early_exit:k=3,width=2"):
        assert [o.token_ids for o in llm.generate(prompts, params, spec=spec)] == [o.token_ids for o in plain], spec
