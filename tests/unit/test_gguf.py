"""GGUF files: every type, every architecture and the real file. Wrong ones are in test_wrong_gguf.py."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

from foredraft.backends.torch import TorchBackend
from foredraft.errors import InvalidModel
from foredraft.models.decoder import load_decoder
from foredraft.models.gguf import blocks
from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from foredraft.models.gguf.header import read_header
from foredraft.models.gguf.tokenizer import eos_token_ids
from tests.backends import BACKENDS
from tests.gguf_files import HIDDEN, MINIMAL, convert_to_gguf, minimal_tensors, write_gguf
from tests.tiny_models import VOCAB, all_logits, random_model

# type: the kind of weight that it becomes, and the precision class of a file full of it
TYPES = {
    Type.F32: ("f32", "float32"),
    Type.F16: ("f32", "bfloat16"),
    Type.BF16: ("bf16", "bfloat16"),
    Type.Q8_0: ("q8", "int8"),
    Type.Q6_K: ("q6", "int8"),
    Type.Q5_K: ("q5k", "int8"),
    Type.Q5_1: ("q5", "int8"),
    Type.Q5_0: ("q8", "int8"),
    Type.Q4_K: ("q4k", "int4"),
    Type.Q4_1: ("q4", "int4"),
    Type.Q4_0: ("q4", "int4"),
    Type.MXFP4: ("mx4", "int4"),
    Type.Q3_K: ("f32", "int4"),
    Type.Q2_K: ("f32", "int4"),
}
# Where the float16 scales of a block are, for types that the gguf package cannot quantise to.
HALVES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}


def random_blocks(kind: Type, rows: int, columns: int) -> np.ndarray:
    """Raw bytes [rows, bytes per row] of random but sane weights."""
    random = np.random.default_rng(int(kind))
    if kind not in HALVES:
        return gguf.quants.quantize(random.standard_normal((rows, columns)).astype(np.float32), kind)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // length, size), dtype=np.uint8)
    for offset in HALVES[kind]:
        blocks[:, offset : offset + 2] = random.uniform(0.01, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("piece_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_means_what_the_gguf_package_says(
    kind: Type, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_PIECE_BYTES", piece_bytes)
    tensors = minimal_tensors()
    matrices = {name: random_blocks(kind, *tensor.shape) for name, tensor in tensors.items() if tensor.ndim == 2}
    types = {name: kind for name in matrices if kind not in (Type.F32, Type.F16)}
    path = write_gguf(tmp_path / "model.gguf", MINIMAL, {**tensors, **matrices}, types)

    checkpoint = GGUFCheckpoint(path)
    weight = checkpoint.weight("model.layers.0.mlp.down_proj.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(matrices["blk.0.ffn_down.weight"], kind))
    assert weight.kind == TYPES[kind][0]
    assert checkpoint.precision == TYPES[kind][1]
    assert torch.equal(weight.dense(), expected)
    assert expected.std() > 0.01

    # q is permuted as codes; the values must be those of the dequantised rows, put back in order.
    query = torch.from_numpy(gguf.quants.dequantize(matrices["blk.0.attn_q.weight"], kind))
    in_order = query.view(4, HIDDEN // 8, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(checkpoint.weight("model.layers.0.self_attn.q_proj.weight").dense(), in_order)


# Of those of tiny_models, what makes it a model that a GGUF file can describe.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {},
    "llama-biased": {},
    "llama-3.1": {},
    "llama-linear": {},
    "llama-yarn": {},
    "llama-wide-head": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "phi3": {},
    "phi3-longrope": {},
    "phi3-partial": {},
    "granite": {},
    "qwen3-moe": {},
    "qwen3-moe-dense": {"mlp_only_layers": []},  # every layer has experts, whose weights are not normalised here
    "gpt-oss": {},
    "gemma3": {},
    "gemma3-scaled": {"query_pre_attn_scalar": 32},  # the width of a head
}


@dataclass(frozen=True)
class Converted:
    """A transformers model and its GGUF file, with its logits for a prompt that is several windows long."""

    name: str
    model: Any
    path: Path
    prompt: list[int]
    expected: torch.Tensor


@pytest.fixture(scope="module", params=ARCHITECTURES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    model = random_model(request.param, **ARCHITECTURES[request.param])
    path = convert_to_gguf(model, tmp_path_factory.mktemp("converted") / "model.gguf")
    prompt = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return Converted(request.param, model, path, prompt.tolist(), model(prompt[None]).logits[0])


def test_tensors_of_a_converted_model_are_those_of_the_model(converted: Converted) -> None:
    """Rows permuted as llama.cpp permutes them come back in order."""
    checkpoint = GGUFCheckpoint(converted.path)
    for tensor_name, tensor in converted.model.state_dict().items():
        if tensor_name in checkpoint.names():
            found = checkpoint.weight(tensor_name).values if tensor.dim() == 2 else checkpoint.vector(tensor_name)
            if "gemma3" not in converted.name or tensor.dim() == 2:  # whose norms have other names and values
                assert torch.equal(found, tensor), tensor_name


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_a_converted_model_are_those_of_the_model(converted: Converted, backend: str) -> None:
    has_windows = any(GGUFCheckpoint(converted.path).config.windows)
    length = 300 if backend == "native" or has_windows else 70  # torch takes long
    difference = all_logits(converted.path, converted.prompt[:length], backend) - converted.expected[:length]
    assert difference.abs().max() < 1e-4
    assert converted.expected.std() > 0.1, "logits this flat would hide an error"


def test_a_gemma_file_ends_turns_and_must_have_its_window(tmp_path: Path) -> None:
    metadata = {key.replace("llama.", "gemma3."): value for key, value in MINIMAL.items()}
    metadata |= {"tokenizer.ggml.tokens": [*MINIMAL["tokenizer.ggml.tokens"][:5], "<end_of_turn>"]}
    tensors = minimal_tensors() | {
        f"blk.0.{name}.weight": np.ones(width, np.float32)
        for name, width in {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}.items()
    }
    tensors |= {f"blk.0.attn_{side}_norm.weight": np.ones(HIDDEN // 4, np.float32) for side in "qk"}
    for window in ({}, {"gemma3.attention.sliding_window": 0}):
        path = write_gguf(tmp_path / "wrong.gguf", {**metadata, **window}, tensors, architecture="gemma3")
        with pytest.raises(InvalidModel, match=r"gemma3\.attention\.sliding_window is (missing|0, but a whole number)"):
            GGUFCheckpoint(path)
    metadata |= {"gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base_swa": 5e3}
    config = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", metadata, tensors, architecture="gemma3")).config
    assert config.eos_token_ids == (1, 5)
    assert (config.window_rope_theta, config.window_of_layer(0)) == (5e3, 8)


def test_an_answer_of_gpt_oss_ends_where_no_message_can_follow() -> None:
    tokens = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    assert eos_token_ids({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2}) == (2, 3)
    assert eos_token_ids({"tokenizer.ggml.tokens": tokens[:2], "tokenizer.ggml.eos_token_id": 0}) == (0, 1)


def test_experts_of_a_file_must_be_as_many_as_it_says(tmp_path: Path) -> None:
    model = random_model("qwen3-moe")
    whole = gguf.GGUFReader(convert_to_gguf(model, tmp_path / "model.gguf"))
    tensors = {tensor.name: np.array(tensor.data) for tensor in whole.tensors}
    metadata = {key: field.contents() for key, field in whole.fields.items() if key[:4] not in ("GGUF", "gene")}

    def refused(message: str, **changes: Any) -> None:
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        new = {
            key: value for key, value in {**tensors, **changed}.items() if isinstance(value, np.ndarray) and len(value)
        }
        fields = {**metadata, **{key: value for key, value in changed.items() if isinstance(value, int)}}
        with pytest.raises(InvalidModel, match=message):
            GGUFCheckpoint(write_gguf(tmp_path / "wrong.gguf", fields, new, architecture="qwen3moe"))

    refused("asks for 7 experts with 32 rows each", qwen3moe__expert_count=7)
    refused("has 224 rows for all experts", blk__1__ffn_up_exps__weight=tensors["blk.1.ffn_up_exps.weight"][:7])
    refused("9 experts of a token are to be chosen of 8", qwen3moe__expert_used_count=9)
    refused(r"experts\.0\.up_proj\.weight' is missing", blk__1__ffn_up_exps__weight=np.zeros(0))


def test_weights_of_experts_are_normalised_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    for name, says, normalised in (
        ("qwen3-moe", {}, True),
        ("qwen3-moe", {"qwen3moe.expert_weights_norm": True}, True),
        ("qwen3-moe", {"qwen3moe.expert_weights_norm": False}, False),
        ("gpt-oss", {"gpt-oss.expert_weights_norm": False}, True),  # those of the chosen add up to 1 whatever it says
    ):
        path = convert_to_gguf(random_model(name), tmp_path / "model.gguf", fields=says)
        experts = GGUFCheckpoint(path).config.experts
        assert experts is not None and experts.normalised is normalised, (name, says)


@pytest.mark.parametrize(("stated", "known"), [(4096, 8192), (8192, 8192), (9000, 9000)])
def test_yarn_lengthens_a_context_that_is_the_short_one(stated: int, known: int, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_context_length": 4096}
    rope = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    path = write_gguf(tmp_path / "a.gguf", {**MINIMAL, "llama.context_length": stated, **rope}, minimal_tensors())
    assert GGUFCheckpoint(path).config.max_position_embeddings == known


def test_rows_left_interleaved_would_show(tmp_path: Path) -> None:
    """The comparison above can fail: a file whose q and k rows are in order is another model."""
    model = random_model("llama")
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        rows = weight.data.view(model.config.num_attention_heads, -1, 2, model.config.hidden_size)
        weight.data = rows.transpose(1, 2).reshape(weight.shape).contiguous()
    path = convert_to_gguf(model, tmp_path / "model.gguf")
    prompt = list(range(20))
    with torch.inference_mode():
        expected = random_model("llama")(torch.tensor([prompt])).logits[0]
    assert (all_logits(path, prompt, "torch") - expected).abs().max() > 1e-2


def test_tensors_are_those_that_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference reader of GGUF files")
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF files")
    path = convert_to_gguf(random_model("llama"), tmp_path / "model.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=path.name, dtype=torch.float32
        ).state_dict()
    checkpoint = GGUFCheckpoint(path)
    assert len(checkpoint.names()) == 3 + 3 * 9
    for name in checkpoint.names():
        assert torch.equal(checkpoint.weight(name).values.view(reference[name].shape), reference[name]), name


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    types = {
        "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.F16,
    }
    assert num_tensors_alike(write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors(), types)) == 11


@pytest.mark.slow  # the package takes long to read a vocabulary of real size
def test_header_of_the_default_model_agrees_with_the_gguf_package(default_model: Path) -> None:
    assert num_tensors_alike(default_model) == 272


def num_tensors_alike(path: Path) -> int:
    """How many tensors there are; all that a header says of them and besides is what the package says."""
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    assert len(header.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert (entry.shape, entry.type) == (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type)
        assert (entry.start, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    return len(header.tensors)


def test_the_default_model(default_model: Path) -> None:
    checkpoint = GGUFCheckpoint(default_model)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.tie_word_embeddings) == (49152, 100000.0, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert checkpoint.precision == "int4"
    assert checkpoint.generation == {}
    assert checkpoint.weight("model.embed_tokens.weight").kind == "q8"
    assert checkpoint.weight("model.layers.29.mlp.down_proj.weight").kind == "q4"


@pytest.mark.parametrize(("rounds_all", "kept"), [(False, "q8"), (True, "q4")])
def test_what_a_4_bit_file_keeps_at_8_bits(rounds_all: bool, kept: str, tmp_path: Path) -> None:
    types = {name: Type.Q4_0 for name, tensor in minimal_tensors().items() if tensor.ndim == 2}
    types |= dict.fromkeys(("token_embd.weight", "output.weight", "blk.0.ffn_down.weight"), Type.Q8_0)
    plain = minimal_tensors() | {"output.weight": minimal_tensors()["token_embd.weight"]}
    tensors = {name: quantize(tensor, types[name]) if name in types else tensor for name, tensor in plain.items()}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MINIMAL, tensors, types))
    assert checkpoint.precision == "int4"
    backend = TorchBackend("int4", torch.device("cpu"))
    decoder = load_decoder(checkpoint, "int4", 64, backend, rounds_all=rounds_all)
    (layer,) = decoder.layers
    assert (layer.qkv.kinds, layer.output.kinds, layer.mlp.gate_up.kinds) == (("q4",),) * 3
    assert (decoder.embedding.kinds, layer.mlp.down.kinds, decoder.head.kinds) == (("q8",), (kept,), (kept,))


def test_unknown_tensor_name(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors()))
    with pytest.raises(InvalidModel, match="has no tensor 'nothing'"):
        checkpoint.weight("nothing")
