"""Experts and attention sinks on a GPU: the kernels against plain references, then whole models.

Without a device, TRITON_INTERPRET=1 runs what does not ask for bits, slowly, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.audit.prompts import BUILT_IN
from foredraft.audit.rows import row_checks
from foredraft.audit.text import text_checks, unusable_proposers
from foredraft.backends.base import run_layers
from foredraft.backends.layers import ACTIVATIONS, Experts, LayerKV, Linear, Mlp, Stack
from foredraft.backends.torch import TorchBackend
from foredraft.backends.weight import Weight
from foredraft.batch import pack
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import load_decoder
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice, Spec, proposer_names
from foredraft.runtime.kv import KVCache
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work
from tests.contract.test_same_text import COMMON, MODES, OTHERS, PROMPT, same
from tests.contract.test_trees import PROMPTS, RandomTrees, run
from tests.gpu.kernel_device import DEVICE, INTERPRETED, needs_kernels, small
from tests.gpu.test_cuda_kernels import attended, backend, bits, layer_of, planned, random_stack, rounded, widened
from tests.native.scene import Scene, attention_shape
from tests.native.weights import KINDS, error, fitting, random_weight
from tests.tiny_models import VOCAB, random_model, save_model
from tests.unit.test_gpt_oss import mxfp4

pytestmark = needs_kernels
if INTERPRETED or torch.cuda.is_available():
    from foredraft.backends.cuda.backend import CudaBackend
    from foredraft.backends.cuda.experts import route, rows_together

COUNT, CHOSEN, WIDTH = 9, 3, 256
ARCHITECTURES = ["qwen3-moe", "qwen3-moe-dense", "gpt-oss"]
device = pytest.mark.skipif(INTERPRETED, reason="runs whole models on a device")


class Mixture:
    """Random experts, and what their weights stand for."""

    def __init__(self, kind: str, normalised: bool = True, inner: int = 96, down: str = "", bias: bool = True) -> None:
        inner = fitting(down or kind, inner)
        weights = [(self.weight(kind, 2 * inner, WIDTH), self.weight(down or kind, WIDTH, inner)) for _ in range(COUNT)]
        self.values = [tuple(widened(weight).cpu() for weight in of_expert) for of_expert in weights]
        each = tuple(Mlp(*(layer_of(weight, bias=bias) for weight in of_expert)) for of_expert in weights)
        router = Weight("f32", torch.randn(COUNT, WIDTH) / 16)
        self.experts = Experts(layer_of(router, bias=True), each, CHOSEN, normalised)
        self.router = router.values.double()
        self.kinds = weights[0]

    def weight(self, kind: str, outputs: int, inputs: int) -> Weight:
        """About as large as those of a model, so that activations neither vanish nor saturate."""
        weight = random_weight(kind, outputs, inputs)
        if kind in ("f32", "bf16"):
            return Weight(kind, weight.values / inputs**0.5)
        scales, minimums, blocks, block_minimums = weight.parts[1:]
        if kind == "mx4":
            return replace(weight, scales=scales - 5)
        if blocks is not None:
            return replace(
                weight,
                block_scales=blocks / inputs,
                block_minimums=None if block_minimums is None else block_minimums / inputs,
            )
        return replace(weight, scales=scales / inputs, minimums=None if minimums is None else minimums / inputs)

    def expected(self, x: Tensor, activation: str) -> Tensor:
        """Row by row, in float64, with what a layer reads rounded as the kernels round it."""
        experts, x = self.experts, x.cpu()
        read = rounded(x, self.kinds[0]).cpu()
        assert experts.router.bias is not None
        scores = read @ self.router.T + experts.router.bias.cpu().double()
        best, chosen = scores.topk(CHOSEN)
        shares = best.softmax(1) if experts.normalised else scores.softmax(1).gather(1, chosen)
        plain = TorchBackend("float32", torch.device("cpu"))
        out = torch.zeros(len(x), WIDTH, dtype=torch.float64)
        for row in range(len(x)):
            for share, expert in zip(shares[row], chosen[row].tolist(), strict=True):
                mlp, (gate_up, down) = experts.each[expert], self.values[expert]
                wide = gate_up @ read[row] + biased(mlp.gate_up)
                active = plain.gated(wide.float()[None], activation)[0]
                out[row] += share * (down @ rounded(active, self.kinds[1]).cpu() + biased(mlp.down))
        return out


def biased(layer: Linear) -> Tensor | float:
    return 0.0 if layer.bias is None else layer.bias.cpu().double()


class TestExperts:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rows", [1, 7] if INTERPRETED else [1, 7, 40, 300])
    def test_a_row_gets_what_its_experts_give(self, kind: str, rows: int) -> None:
        mixture, x = Mixture(kind), small(rows, WIDTH).bfloat16().float()
        assert error(backend().mix_experts(x, mixture.experts, "silu").cpu(), mixture.expected(x, "silu")) < 4e-3

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("normalised", [True, False])
    def test_in_float32(self, activation: str, normalised: bool) -> None:
        mixture, x = Mixture("f32", normalised), small(5, WIDTH)
        mixed = backend("float32").mix_experts(x, mixture.experts, activation)
        assert error(mixed.cpu(), mixture.expected(x, activation)) < 1e-5

    def test_layers_of_two_kinds_and_odd_sizes(self) -> None:
        """Gates and ups of different kinds are not activated by one kernel; an odd size fills no tile."""
        mixture, x = Mixture("q4", inner=40, down="f32", bias=False), small(6, WIDTH).bfloat16().float()
        whole = backend().mix_experts(x, mixture.experts, "clamped")
        assert error(whole.cpu(), mixture.expected(x, "clamped")) < 4e-3
        weights = [mixture.weight(kind, 40, WIDTH) for kind in ("q4", "q8")]
        mixed = tuple(Mlp(layer_of(*weights, bias=True), mlp.down) for mlp in mixture.experts.each)
        mixture.experts = replace(mixture.experts, each=mixed)
        mixture.values = [
            (torch.cat([widened(weight).cpu() for weight in weights]), down) for _, down in mixture.values
        ]
        apart = backend().mix_experts(x, mixture.experts, "silu")
        assert error(apart.cpu(), mixture.expected(x, "silu")) < 4e-3

    def test_experts_that_no_row_chose_are_not_read(self) -> None:
        mixture, x = Mixture("bf16"), small(6, WIDTH)
        few = torch.tensor([1e4] * CHOSEN + [-1e4] * (COUNT - CHOSEN), device=DEVICE)
        experts = replace(mixture.experts, router=replace(mixture.experts.router, bias=few))
        mixed = backend().mix_experts(x, experts, "silu")
        for mlp in experts.each[CHOSEN:]:
            for layer in (mlp.gate_up, mlp.down):
                layer.parts[0].low.fill_(torch.nan)
        assert torch.equal(backend().mix_experts(x, experts, "silu"), mixed) and mixed.isfinite().all()

    def test_rows_that_are_no_numbers_harm_no_other(self) -> None:
        mixture, x = Mixture("bf16"), small(9, WIDTH)
        expected = backend().mix_experts(x, mixture.experts, "silu")
        damaged = x.clone()
        damaged[2:5], damaged[7, 3] = torch.nan, torch.inf
        mixed = backend().mix_experts(damaged, mixture.experts, "silu")
        others = [0, 1, 5, 6, 8]
        assert torch.equal(mixed[others], expected[others])
        assert mixed[2:5].isnan().all() and not mixed[7].isfinite().any()

    @bits
    @pytest.mark.parametrize("kind", KINDS)
    def test_bits_of_a_row_are_its_own(self, kind: str) -> None:
        """Alone, among others, in runs of every size, and so with every number of rows together."""
        mixture, x = Mixture(kind, inner=512), small(1500, WIDTH).bfloat16().float()
        assert {rows_together(rows, CHOSEN, COUNT) for rows in (1, 16, 40, 1500)} == {8, 16, 32, 64}
        whole = backend().mix_experts(x, mixture.experts, "silu")
        for rows in (1, 2, 3, 7, 8, 9, 16, 33, 64, 100, 256, 257, 700):
            for start in {0, (1500 - rows) // 3, 1500 - rows}:
                part = backend().mix_experts(x[start : start + rows].contiguous(), mixture.experts, "silu")
                assert torch.equal(part, whole[start : start + rows]), (rows, start)


class TestRoutes:
    @pytest.mark.parametrize(("count", "chosen"), [(9, 3), (128, 8), (32, 4), (5, 5), (1, 1), (6, 1)])
    @pytest.mark.parametrize("rows", [1, 2, 7, 33] if INTERPRETED else [1, 2, 7, 33, 64, 500, 2048])
    @pytest.mark.parametrize("flat", [False, True])
    def test_every_choice_is_in_one_task_of_its_expert(self, count: int, chosen: int, rows: int, flat: bool) -> None:
        """Also where all rows choose the same experts, and where some rows only fill up."""
        scores = torch.zeros(2, rows, count, device=DEVICE) if flat else small(2, rows, count)
        slots = torch.arange(rows, device=DEVICE)
        slots[rows // 2 :: 3] = -1
        experts = Experts(Linear((), count, 0), (), chosen, True)
        routes = route(scores, experts, slots)
        best = scores.sum(0).cpu().sort(dim=1, descending=True, stable=True).indices[:, :chosen]
        wanted = {
            (expert, row * chosen + rank)
            for row in range(rows)
            if slots[row] >= 0
            for rank, expert in enumerate(best[row].tolist())
        }
        choices, found = routes.choices.tolist(), list[tuple[int, int]]()
        for expert, start, stop in routes.tasks.tolist():
            assert stop - start <= routes.together and (stop > start) == (expert >= 0)
            found += [(expert, choice) for choice in choices[start:stop]]
        assert len(found) == len(set(found)) and set(found) == wanted
        weights = scores.sum(0).cpu().double().gather(1, best).softmax(1)
        assert (routes.shares.cpu() - weights).abs().max() < 1e-6

    def test_one_row_needs_as_many_tasks_as_it_has_experts(self) -> None:
        routes = route(small(1, 1, 128), Experts(Linear((), 128, 0), (), 8, True), None)
        assert len(routes.tasks) == 8 and (routes.tasks[:, 0] >= 0).all()


class TestSinks:
    @pytest.mark.parametrize("window", [0, 100])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_take_their_share(self, window: int, dtype: str) -> None:
        """Few rows and a prompt, against the other backend."""
        kv_dtype = backend(dtype).kv_dtype
        scene = Scene(attention_shape(4, 64, window), [40, 150, 300], kv_dtype)
        scene.rows = [(1, 120, [125, 130]), (1, 120, [126]), (2, 300, []), (0, 40, []), (0, 1, [])]
        scene.rows += [(1, prefix, []) for prefix in range(60, 150)]
        q, sinks = torch.randn(len(scene.rows), 12 * 64).to(kv_dtype).float(), 3 * torch.randn(12)
        reference = TorchBackend("float32", torch.device("cpu"))
        wide = LayerKV(scene.cache.k.float(), scene.cache.v.float())
        plan = planned(scene)
        assert plan.whole is not None and plan.split is not None
        expected = reference.attend(q, wide, scene.shape, scene.batch(), sinks).double()
        found = attended(scene, q, dtype=dtype, sinks=sinks)
        assert error(found, expected) < (1e-5 if dtype == "float32" else 6e-3)
        assert error(found, reference.attend(q, wide, scene.shape, scene.batch()).double()) > 0.1, "they count"
        nothing = attended(scene, q, dtype=dtype, sinks=torch.full((12,), -torch.inf))
        assert torch.equal(nothing, attended(scene, q, dtype=dtype))

    @bits
    @pytest.mark.parametrize("window", [0, 100])
    def test_bits_of_a_row_are_its_own(self, window: int) -> None:
        """A prompt at once, in pieces and row by row: both kernels begin with the sinks."""
        scene = Scene(attention_shape(8, 64, window), [600], torch.bfloat16)
        scene.rows = [(0, prefix, []) for prefix in range(1, 601)]
        q, sinks = torch.randn(600, 24 * 64), 2 * torch.randn(24)
        whole = attended(scene, q, sinks=sinks)
        for rows in ([0], [127, 128, 129], list(range(300, 320)), list(range(400, 600)), [599]):
            assert torch.equal(attended(scene, q[rows], rows, sinks=sinks), whole[rows]), rows


def as_gpt_oss(stack: Stack, kind: str, rows: int) -> Stack:
    """With experts and sinks in all layers, and a window in the first."""
    layers = []
    for index, layer in enumerate(stack.layers):
        each = tuple(
            Mlp(*(layer_of(random_weight(kind, *shape), bias=True) for shape in ((2 * 320, 576), (576, 320))))
            for _ in range(12)
        )
        experts = Experts(layer_of(Weight("f32", torch.randn(12, 576)), bias=True), each, 4, True)
        shape = replace(layer.shape, window=0 if index else rows // 5)
        layers.append(replace(layer, mlp=experts, sinks=small(9), shape=shape, activation="clamped"))
    return replace(stack, layers=tuple(layers))


class TestLayers:
    @bits
    @pytest.mark.parametrize("kind", ["bf16", "q4", "mx4"])
    def test_all_ways_through_the_layers_give_the_same_bits(self, kind: str) -> None:
        """Fused, verb by verb, as a prompt in one go, in chunks, and row by row at the end."""
        rows = 640
        stack = as_gpt_oss(random_stack("bf16"), kind, rows)
        scene = Scene(stack.layers[0].shape, [rows], torch.bfloat16)
        scene.rows = [(0, prefix, []) for prefix in range(1, rows + 1)]
        slots = scene.slots(0, torch.arange(rows)).to(DEVICE)
        scene.tables = scene.tables.to(DEVICE)
        x = small(rows, 576)

        def run(chunks: list[int], fused: bool = True) -> Tensor:
            shape = (len(scene.cache.k), 3, 64)
            kv = [
                LayerKV(*(torch.full(shape, torch.nan, device=DEVICE).bfloat16() for _ in range(2)))
                for _ in stack.layers
            ]
            done, out, kernels = 0, [], backend()
            for size in chunks:
                part = list(range(done, done + size))
                batch = planned(scene, part, slots=slots[part])
                go = kernels.run_layers if fused else lambda *given: run_layers(kernels, *given)
                out.append(go(x[part].clone(), stack, kv, batch)[1].float())
                done += size
            return torch.cat(out)

        whole = run([rows])
        assert whole.isfinite().all()
        assert torch.equal(run([rows], fused=False), whole)
        assert torch.equal(run([256, 320, 33, *[1] * 20, 8, 3]), whole)


def logits_of(folder: Path, prompt: list[int], dtype: str) -> Tensor:
    """Of every position of a prompt that goes through the CUDA kernels in one run, on whatever DEVICE is."""
    checkpoint, kernels = open_checkpoint(folder), CudaBackend(dtype, DEVICE)
    decoder = load_decoder(checkpoint, dtype, 512, kernels)
    kv = KVCache(num_blocks=32, block_size=16)
    runner = Runner(decoder, kernels, kv.add_group("target", checkpoint.config, kernels))
    sequence = Sequence(
        *(0, "", 0, prompt, len(prompt), SamplingParams(prompt_logprobs=0), 0, 1), block_table=list(range(31, -1, -1))
    )
    return runner.forward(pack([Work(sequence, len(prompt))], kv.block_size)).logits.cpu()


class TestModels:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_logits_are_those_of_transformers(self, name: str, tmp_path: Path) -> None:
        model = random_model(name)
        folder = save_model(model, tmp_path)
        for length in (3,) if INTERPRETED else (1, 17, 64, 300):
            prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))
            with torch.inference_mode():
                expected = model(prompt[None]).logits[0]
            assert (logits_of(folder, prompt.tolist(), "float32") - expected).abs().max() < 1e-4, length

    @pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("int4", 0.06)])
    def test_logits_of_mxfp4_are_near_those_of_its_values(self, dtype: str, tolerance: float, tmp_path: Path) -> None:
        """Widened, or as codes of 4 bits. Most rows: where two experts have almost the same score, rounding may choose
        the other one, on any backend."""
        model = mxfp4(tmp_path)
        prompt = torch.randint(VOCAB, (3 if INTERPRETED else 100,), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected = model(prompt[None]).logits[0].double()
        found = logits_of(tmp_path, prompt.tolist(), dtype)
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() < tolerance

    @device
    @pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_a_request_gives_the_same_bits_however_it_is_run(self, name: str, dtype: str, tmp_path: Path) -> None:
        folder = save_model(random_model(name), tmp_path)

        def engine(**options: Any) -> LLM:
            return LLM(str(folder), dtype=dtype, backend="cuda", device="cuda", spec="off", **options)

        llm = engine(max_num_seqs=8)
        alone = {mode: llm.generate([PROMPT], params)[0] for mode, params in MODES.items()}
        for mode, params in MODES.items():
            again = llm.generate([PROMPT], params)[0]
            assert again.metrics.cached_tokens > 60, "the second call hits the prefix cache"
            same(alone[mode], again)
            same(alone[mode], llm.generate([*OTHERS, PROMPT], params)[-1])
            for spec in ("ngram:k=5", "suffix", "lookahead", "early_exit:k=3,width=2"):
                same(alone[mode], llm.generate([*OTHERS[:2], PROMPT], params, spec=spec)[-1])
        for options in ({"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 77}, {"kv_cache_tokens": 160}):
            llm = engine(max_num_seqs=4, prefix_caching=False, **options)
            for mode, params in MODES.items():
                same(alone[mode], llm.generate([*OTHERS[:2], PROMPT], params)[-1])

    @device
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_random_trees_do_not_change_the_text(self, name: str, tmp_path: Path) -> None:
        folder = save_model(random_model(name), tmp_path)
        params = SamplingParams(temperature=0.9, seed=11, **{**COMMON, "max_tokens": 60})
        plain = run(LLM(str(folder), dtype="bfloat16", device="cuda"), params, Spec())
        texts = {tuple(prompt): output.token_ids for prompt, output in zip(PROMPTS, plain, strict=True)}
        proposer = RandomTrees(texts, seed=1)
        llm = LLM(str(folder), dtype="bfloat16", device="cuda", kv_cache_tokens=256, max_num_seqs=5)
        llm.engine.speculation.assignments.install(ProposerChoice(proposer.name), proposer)
        drafted = run(llm, params, Spec((ProposerChoice(proposer.name),)))
        for on, off in zip(drafted, plain, strict=True):
            assert (on.token_ids, on.logprobs) == (off.token_ids, off.logprobs)
        assert sum(output.metrics.accepted_tokens for output in drafted) > 60

    @device
    @pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma3"])
    def test_an_audit_passes(self, name: str, tmp_path: Path) -> None:
        llm = LLM(str(save_model(random_model(name), tmp_path)), dtype="bfloat16", device="cuda")
        specs = [name for name in proposer_names() if name not in unusable_proposers(llm)]
        assert len(specs) > 3
        checks = [*text_checks(llm, BUILT_IN[:8], [*specs, "auto"], 24, lambda: None)]
        checks += row_checks(llm.engine.runner, lambda: None)
        assert not [check for check in checks if not check.passed]
