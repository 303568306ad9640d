"""Layers with a sliding window keep what their windows reach, and no more. Whatever they lose is made NaN at once, so
that a row which still reads it would have no number to say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.engine.window_blocks import WindowBlocks
from foredraft.llm import LLM
from foredraft.outputs import RequestOutput
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.runtime.kv import TARGET_GROUP, WINDOWS_GROUP
from foredraft.server.metrics import Metrics
from tests.backends import BACKENDS
from tests.contract.test_same_text import same
from tests.contract.test_trees import PROMPTS, RandomTrees, run
from tests.tiny_models import VOCAB, random_model, save_model

# Five layers to one with windows of 24, every other with windows of 24 and sinks, and all with windows of 50.
ARCHITECTURES = ["gemma3", "gpt-oss", "mistral-sliding"]
LONG = [(11 * place * place + 3) % VOCAB for place in range(150)]
OTHERS = [[(7 * place + 5 * index) % VOCAB for place in range(9 + 40 * index)] for index in range(4)]
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=60, logprobs=2, ignore_eos=True)
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 4}  # window blocks for few tokens
EVERYTHING = {
    "max_num_seqs": 64,
    "block_size": 4,
    "kv_cache_tokens": 512,
}  # no fewer window blocks than blocks: there are none


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model(request.param), tmp_path_factory.mktemp("tiny"))


def load(folder: Path, backend: str, **options: Any) -> LLM:
    device = "cuda" if backend == "cuda" else "cpu"
    return LLM(str(folder), dtype="float32", backend=backend, device=device, spec="off", threads=2, **options)


def poison(llm: LLM, patch: pytest.MonkeyPatch) -> WindowBlocks:
    """Make everything NaN that layers with a window do not hold: now, whenever a block gets a window block, and
    whenever one loses its own."""
    windows, size = llm.engine.scheduler.pool.windows, llm.engine.kv.block_size
    assert windows is not None
    memory = llm.engine.kv.groups[WINDOWS_GROUP].memory
    memory.fill_(torch.nan)
    add, forget = windows.add, windows.forget

    def fill(block: int) -> None:
        kept = windows.of_block[block]
        memory[:, kept * size : (kept + 1) * size] = torch.nan

    def added(block: int) -> None:
        add(block)
        fill(block)

    def forgotten(block: int) -> None:
        if block in windows._unheld:
            fill(block)
        forget(block)

    patch.setattr(windows, "add", added)
    patch.setattr(windows, "forget", forgotten)
    return windows


def answers(llm: LLM, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, PARAMS, **options)
    llm.engine.scheduler.check_integrity()
    return outputs


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_model_that_keeps_windows_says_what_one_says_that_keeps_everything(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [LONG, *OTHERS]
    whole = load(folder, backend, **EVERYTHING)
    assert whole.engine.scheduler.pool.windows is None and set(whole.engine.kv.groups) == {TARGET_GROUP}
    expected = answers(whole, prompts)
    for options in ({}, {"prefix_caching": False}):
        llm = load(folder, backend, **SMALL, **options)
        poison(llm, monkeypatch)
        for output, right in zip(answers(llm, prompts), expected, strict=True):
            same(output, right)
    same(answers(llm, [LONG], spec="early_exit:k=3,width=2")[0], expected[0])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_conversation_goes_on_where_it_was(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn finds what the first has left. Once other requests have needed its window blocks, it finds
    nothing, is computed again, and is found again."""
    llm = load(folder, backend, **SMALL)
    windows = poison(llm, monkeypatch)
    first = answers(llm, [LONG])[0]
    second = [*LONG, *first.token_ids, *LONG[:20]]
    expected = answers(load(folder, backend, **EVERYTHING), [second])[0]
    found = answers(llm, [second])[0]
    same(found, expected)
    assert found.metrics.cached_tokens >= len(LONG) + len(first.token_ids) - 2 * 4
    for index in range(windows.num_window_blocks // 10):
        answers(llm, [[(3 * place + index) % VOCAB for place in range(100)]])
    for is_found in (False, True):
        again = answers(llm, [second])[0]
        same(again, expected)
        assert (again.metrics.cached_tokens > 0) == is_found


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_prefix_is_found_where_all_of_its_window_is_left(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that part from a long one early, within what its windows have long left behind."""
    llm = load(folder, backend, **SMALL)
    poison(llm, monkeypatch)
    whole = load(folder, backend, **EVERYTHING)
    answers(llm, [LONG])
    found = []
    for length in (140, 90, 50, 20):
        prompt = [*LONG[:length], *LONG[:30]]
        output = answers(llm, [prompt])[0]
        same(output, answers(whole, [prompt])[0])
        found.append(output.metrics.cached_tokens)
    assert any(found) and not all(found)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_who_is_set_aside_comes_back_with_the_same_text(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(load(folder, backend, **EVERYTHING), [LONG, *OTHERS])
    llm = load(folder, backend, **{**SMALL, "max_num_batched_tokens": 8}, kv_cache_tokens=240)
    poison(llm, monkeypatch)
    outputs = answers(llm, [LONG, *OTHERS])
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output, right in zip(outputs, expected, strict=True):
        same(output, right)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_trees_see_windows_along_their_own_paths(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(load(folder, backend, **EVERYTHING), PARAMS, Spec())
    texts = {tuple(prompt): output.token_ids for prompt, output in zip(PROMPTS, plain, strict=True)}
    llm = load(folder, backend, **SMALL)
    poison(llm, monkeypatch)
    proposer = RandomTrees(texts, seed=3)
    llm.engine.speculation.assignments.install(ProposerChoice(proposer.name), proposer)
    drafted = run(llm, PARAMS, Spec((ProposerChoice(proposer.name),)))
    for off, on in zip(plain, drafted, strict=True):
        assert (off.token_ids, off.logprobs) == (on.token_ids, on.logprobs)
    assert sum(output.metrics.accepted_tokens for output in drafted) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_few_tokens(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch, a second turn and a tree, of few tokens: torch's kernels are slow."""
    prompts, params = [LONG[:60], OTHERS[0]], replace(PARAMS, max_tokens=12)
    whole, llm = load(folder, backend, **EVERYTHING), load(folder, backend, **SMALL)
    poison(llm, monkeypatch)
    expected = whole.generate(prompts, params)
    for output, right in zip(llm.generate(prompts, params), expected, strict=True):
        same(output, right)
    second = [*LONG[:60], *expected[0].token_ids, *LONG[:5]]
    found = llm.generate([second], params, spec="early_exit:k=3,width=2")[0]
    assert found.metrics.cached_tokens > 60
    same(found, whole.generate([second], params)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_that_is_let_go_too_early_is_missed(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail."""
    prompt, params = LONG[:60], replace(PARAMS, max_tokens=12)
    expected = load(folder, backend, **EVERYTHING).generate([prompt], params)[0]
    first_seen = WindowBlocks._first_seen
    monkeypatch.setattr(WindowBlocks, "_first_seen", lambda self, computed: first_seen(self, computed + 4))
    llm = load(folder, backend, **SMALL, prefix_caching=False)
    poison(llm, monkeypatch)
    try:
        assert llm.generate([prompt], params)[0].token_ids != expected.token_ids
    except Exception as error:
        assert "refused its input" in str(error) or "not finite" in str(error)


def test_bytes(tmp_path: Path) -> None:
    """What is allocated, to the byte."""
    folder = save_model(random_model("gemma3"), tmp_path)
    llm = load(folder, "torch", max_num_seqs=2, max_num_batched_tokens=40, kv_cache_tokens=1000)
    kv, of_layer = llm.engine.kv, 2 * 2 * 32 * 4  # K and V, two heads of 32, float32
    assert (kv.num_blocks, kv.num_window_blocks) == (63, 2 * (2 + 2) + 3)
    assert kv.groups[TARGET_GROUP].memory.nbytes == 1 * of_layer * 63 * 16
    assert kv.groups[WINDOWS_GROUP].memory.nbytes == 6 * of_layer * 11 * 16
    stats = llm.engine.stats()
    assert (stats.kv_bytes_per_token, stats.kv_bytes_per_window) == (of_layer, 6 * of_layer * 24)
    assert (stats.free_window_blocks, stats.num_window_blocks, stats.kv_use) == (11, 11, 0)
    page = Metrics("tiny", llm.engine.stats).render().decode()
    for name, value in (("token", of_layer), ("window", 6 * of_layer * 24)):
        assert f'foredraft:kv_cache_bytes_per_{name}{{engine="0",model_name="tiny"}} {float(value)}' in page
    llm.engine.add("long", LONG[:80], PARAMS, Spec())
    llm.engine.step()  # 40 rows in three blocks, of which the next row sees two
    assert llm.engine.stats().kv_use == 1 - 9 / 11 > 3 / 63
