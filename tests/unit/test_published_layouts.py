"""The references of published heads, held against themselves and against transformers; nothing of ours is used."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.published import dflash, eagle3, mtp
from tests.published.blocks import Heads, decoder_layer, rope_of
from tests.published.layouts import LAYOUTS
from tests.published.shapes import (
    BlockReference,
    Draw,
    OffsetReference,
    PathReference,
    Reference,
    TargetShape,
    layer_weights,
    read_config,
    write_files,
)

TARGET = TargetShape()
POSITIONS = 12
DRAFTED = [3, 50, 7]
PATHS = [name for name, layout in LAYOUTS.items() if issubclass(layout.reference, PathReference)]
BLOCKS = [name for name, layout in LAYOUTS.items() if issubclass(layout.reference, BlockReference)]

_draw = Draw(0)
STREAMS = [_draw.normal(POSITIONS, TARGET.hidden) for _ in range(TARGET.layers + 1)]
EMBEDDING = _draw.normal(TARGET.vocab, TARGET.hidden)
LM_HEAD = _draw.matrix(TARGET.vocab, TARGET.hidden)
FINAL_NORM = _draw.norm(TARGET.hidden)
TOKENS = [(7 * index + 5) % 90 for index in range(POSITIONS + 1)]


def head(name: str, folder: Path) -> Any:
    LAYOUTS[name].write(folder, TARGET, 1)
    return reference(name, folder)


def reference(name: str, folder: Path, kind: type[Reference] | None = None) -> Any:
    return (kind or LAYOUTS[name].reference)(folder, TARGET, EMBEDDING, LM_HEAD, FINAL_NORM)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Heads that a test only reads, each written once."""
    known: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in known:
            known[name] = head(name, tmp_path_factory.mktemp("head"))
        return known[name]

    return get


def logits(reference: Any, streams: list[Tensor], tokens: list[int], drafted: list[int] = DRAFTED) -> Tensor:
    if isinstance(reference, PathReference):
        return reference.path_logits(streams, tokens, drafted)
    if isinstance(reference, BlockReference):
        return reference.block_logits(streams, tokens, tokens[-1:] + DRAFTED + [4, 5])
    assert isinstance(reference, OffsetReference)
    return reference.offset_logits(streams, tokens)


def same(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5)


def differs(one: Tensor, two: Tensor) -> bool:
    return not torch.allclose(one, two, rtol=1e-3, atol=1e-3)


def changed(streams: list[Tensor], stream: int, position: int | slice = slice(None)) -> list[Tensor]:
    streams = [each.clone() for each in streams]
    streams[stream][position] += 1.0
    return streams


# The streams that a head reads, as numbers of layers before them; the target has 8 layers.
READS = {
    "eagle3/eagle": {2, 4, 5},
    "eagle3/eagle-narrow": {2, 4, 5},
    "eagle3/specforge": {2, 5, 7},
    "eagle3/specforge-3.1": {2, 5, 7},
    "eagle3/peagle-vllm": {2, 5, 7},
    "eagle3/nvidia": {2, 4, 8},
    "eagle3/deepspec": {2, 3, 5, 6, 7},
    "dflash/deepspec-dspark": {0, 3, 5, 7},
    "dflash/deepspec-dspark-gated": {0, 3, 5, 7},
    "dflash/deepspec-dspark-bonus-anchor": {0, 3, 5, 7},
    **{name: {2, 5, 7} for name in LAYOUTS if name.startswith("dflash/zlab")},
    "dflash/zlab-taps-unsaid": {2, 4, 6},
    "dflash/zlab-taps-unsaid-one-layer": {5},
    **{name: {1, 4, 7} for name in LAYOUTS if "/speculators" in name or name == "eagle3/peagle"},
    **{name: {1, 4, 7} for name in LAYOUTS if name.startswith("gguf/")},
    **{name: {8} for name in LAYOUTS if name.startswith(("eagle1/", "medusa/", "mtp/"))},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_reads_the_streams_that_its_config_means(name: str, heads: Callable[[str], Any]) -> None:
    subject = heads(name)
    plain = logits(subject, STREAMS, TOKENS)
    finite = plain[plain.isfinite()]
    assert 0.3 < finite.std() < 3.0, "logits of order one"
    first = logits(subject, STREAMS, TOKENS, [])
    others = STREAMS
    for stream in range(TARGET.layers + 1):
        if stream in READS[name]:
            assert differs(first, logits(subject, changed(STREAMS, stream, POSITIONS - 1), TOKENS, [])), stream
        else:
            others = changed(others, stream)
    same(first, logits(subject, others, TOKENS, []))


@pytest.mark.parametrize("name", PATHS)
def test_a_row_of_a_path_knows_what_lies_before_it_and_nothing_else(name: str, heads: Callable[[str], Any]) -> None:
    subject = heads(name)
    plain = logits(subject, STREAMS, TOKENS)
    for length in range(len(DRAFTED)):
        alone = subject.path_logits(STREAMS, TOKENS, DRAFTED[:length])
        same(plain[: length + 1], alone)
    other = subject.path_logits(STREAMS, TOKENS, [*DRAFTED[:-1], 60])
    same(plain[:-1], other[:-1])
    assert differs(plain[-1], other[-1])


@pytest.mark.parametrize("name", PATHS)
def test_a_path_reads_every_token_but_the_first(name: str, heads: Callable[[str], Any]) -> None:
    subject = heads(name)
    plain = logits(subject, STREAMS, TOKENS, [])
    same(plain, logits(subject, STREAMS, [91, *TOKENS[1:]], []))
    unread = {0, 1} if getattr(subject, "zero_first", False) else {0}
    for position in {1, 2, POSITIONS} - unread:
        tokens = list(TOKENS)
        tokens[position] = 91
        assert differs(plain, logits(subject, STREAMS, tokens, [])), position


@pytest.mark.parametrize(
    "name, flag, rows",
    [
        ("speculators-norm-before-residual", "norm_before_residual", [True] * 4),
        ("speculators-3.1", "norm_before_fc", [True] * 4),
        ("speculators-fc-norm", "fc_norm", [True] * 4),
        # Only what is fed back changes: not the first row.
        ("specforge-3.1", "norm_output", [False, True, True, True]),
    ],
)
def test_a_norm_is_where_its_flag_says(name: str, flag: str, rows: list[bool], tmp_path: Path) -> None:
    with_norm = logits(head(f"eagle3/{name}", tmp_path), STREAMS, TOKENS)
    rewritten(tmp_path, **{flag: False})
    without = logits(reference(f"eagle3/{name}", tmp_path), STREAMS, TOKENS)
    assert [differs(one, two) for one, two in zip(with_norm, without)] == rows


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_reads_its_anchor_and_no_token_before(name: str, heads: Callable[[str], Any]) -> None:
    subject = heads(name)
    plain = subject.block_logits(STREAMS, TOKENS, [1] * 8)
    before = [91 if index != POSITIONS else token for index, token in enumerate(TOKENS)]
    if not name.startswith("eagle3/peagle"):  # whose rows before the block are EAGLE-3's
        same(plain, subject.block_logits(STREAMS, before, [1] * 8))
    assert differs(plain, subject.block_logits(STREAMS, [*TOKENS[:-1], 91], [1] * 8))


@pytest.mark.parametrize("name", ["dflash/speculators-dspark", "dflash/deepspec-dspark-gated", "gguf/dspark"])
def test_a_markov_term_reads_the_token_before(name: str, heads: Callable[[str], Any]) -> None:
    subject = heads(name)
    greedy = subject.block_logits(STREAMS, TOKENS)
    before = [TOKENS[-1], *greedy.argmax(-1).tolist()]
    same(greedy, subject.block_logits(STREAMS, TOKENS, before))
    before[1] = (before[1] + 1) % TARGET.vocab
    other = subject.block_logits(STREAMS, TOKENS, before)
    assert [differs(one, two) for one, two in zip(greedy, other)] == [False, True] + [False] * (len(greedy) - 2)
    if isinstance(subject, dflash.DFlashReference):
        assert subject.block_confidence(STREAMS, TOKENS, before).shape == greedy.shape[:1]


def rewritten(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


@pytest.mark.parametrize("name, causal", [("dflash/zlab-causal", True), ("dflash/zlab", False)])
def test_causal_rows_do_not_know_the_length_of_their_block(name: str, causal: bool, tmp_path: Path) -> None:
    longer = head(name, tmp_path).block_logits(STREAMS, TOKENS)
    rewritten(tmp_path, block_size=3)
    shorter = reference(name, tmp_path).block_logits(STREAMS, TOKENS)
    assert differs(longer[:2], shorter) != causal


def test_own_and_next_position_are_one_row_apart(tmp_path: Path) -> None:
    name = "dflash/speculators-from-anchor"
    following = head(name, tmp_path).block_logits(STREAMS, TOKENS)
    rewritten(tmp_path, sample_from_anchor=False)
    same(following[1:], reference(name, tmp_path).block_logits(STREAMS, TOKENS))


def test_windows_count_from_the_row_or_from_the_anchor(tmp_path: Path) -> None:
    """Both layers slide over 6: z-lab's row r sees from T + r - 5 on, all rows of speculators from T - 6 on."""
    seen = {}
    for name in ("zlab-use-swa", "speculators-sliding"):
        subject = head(f"dflash/{name}", tmp_path / name)
        if name == "speculators-sliding":
            subject.config["layer_types"] = ["sliding_attention"] * 2
        plain = subject.block_logits(STREAMS, TOKENS)
        stream = min(READS[f"dflash/{name}"])
        seen[name] = {
            position
            for position in range(POSITIONS)
            if differs(plain, subject.block_logits(changed(STREAMS, stream, position), TOKENS))
        }
    assert seen["speculators-sliding"] == set(range(POSITIONS - 6, POSITIONS))
    assert seen["zlab-use-swa"] == set(range(POSITIONS - 5, POSITIONS))  # by way of the anchor's row


@pytest.mark.parametrize("scaling", [None, eagle3.LLAMA3, dflash.YARN, {"rope_type": "linear", "factor": 4.0}])
def test_rope_is_that_of_transformers(scaling: dict[str, Any] | None) -> None:
    transformers = pytest.importorskip("transformers")
    parameters = {"rope_type": "default", "rope_theta": 500.0, **(scaling or {})}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=parameters)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = rope_of({"rope_theta": 500.0, "rope_scaling": scaling}, 32)
    same(ours.frequencies, theirs.inv_freq)
    assert ours.scale == pytest.approx(theirs.attention_scaling)


BIASES = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(
    "family, classes, rope, extra, weights",
    [
        ("llama", "Llama", eagle3.LLAMA3, {"attention_bias": True}, {"biases": (*BIASES, "o_proj")}),
        ("qwen3", "Qwen3", dflash.YARN, {}, {"head_norms": True}),
        (
            "glm4_moe",
            "Glm4Moe",
            {"partial_rotary_factor": 0.5},
            {"attention_bias": True, "use_qk_norm": False, "first_k_dense_replace": 1},
            {"biases": BIASES},
        ),
        ("qwen3_5", "Qwen3_5", {"partial_rotary_factor": 0.25}, {"layer_types": ["full_attention"]}, None),
    ],
)
def test_layers_are_those_of_transformers(
    family: str, classes: str, rope: Any, extra: Any, weights: Any, heads: Callable[[str], Any]
) -> None:
    pytest.importorskip("transformers")
    their = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    text = "Text" if family == "qwen3_5" else ""
    rows, draw = 9, Draw(5)
    x, positions = draw.normal(rows, TARGET.hidden), torch.arange(rows)
    common = {
        "hidden_size": TARGET.hidden,
        "intermediate_size": TARGET.intermediate,
        "num_attention_heads": TARGET.heads,
        "num_key_value_heads": TARGET.kv_heads,
        "head_dim": TARGET.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": TARGET.eps,
        "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": TARGET.rope_theta} | rope,
    }
    config = getattr(their, f"{classes}{text}Config")(**common, **extra)
    if weights is None:
        subject, name = heads("mtp/qwen3_5"), "mtp.layers.0."
        tensors = {key.removeprefix(name): value for key, value in subject.tensors.items() if name in key}
        ours = subject.layer(x, positions)
    else:
        layer = layer_weights(draw, "layer", TARGET, **weights)
        tensors = {key.removeprefix("layer."): value for key, value in layer.items()}
        shape, turn = Heads.of(common), rope_of(common, TARGET.head_dim)
        ours = decoder_layer(x, positions, layer, "layer", shape, turn)
    module = getattr(their, f"{classes}DecoderLayer")(config, 0)
    module.load_state_dict(tensors)
    mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
    angles = getattr(their, f"{classes}{text}RotaryEmbedding")(config)(x[None], positions[None])
    with torch.no_grad():
        theirs = module(x[None], attention_mask=mask, position_embeddings=angles)
    same(ours, (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(rows, -1))


@pytest.mark.parametrize("name", ["eagle3", "eagle3-norm-before-residual"])
def test_a_gguf_head_is_its_safetensors_head(name: str, tmp_path: Path) -> None:
    """Undo what the conversion does, by the names of speculators, and compare."""
    subject = head(f"gguf/{name}", tmp_path / "gguf")
    LAYOUTS["eagle3/speculators"].write(tmp_path / "plain", TARGET, 1)
    config = read_config(tmp_path / "plain") | {"norm_before_residual": name != "eagle3"}
    parts = {"attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "ffn_norm": "post_attention_layernorm"}
    parts |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
    parts |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    tensors = {f"layers.0.{new}.weight": subject.tensors[f"blk.0.{old}.weight"] for old, new in parts.items()}
    for part, heads in (("q", TARGET.heads), ("k", TARGET.kv_heads)):
        pairs = tensors[f"layers.0.self_attn.{part}_proj.weight"].unflatten(0, (heads, -1, 2))
        tensors[f"layers.0.self_attn.{part}_proj.weight"] = pairs.transpose(1, 2).flatten(0, 2)
    tensors |= {
        new: subject.tensors[old] for old, new in (("fc.weight", "fc.weight"), ("output.weight", "lm_head.weight"))
    }
    tensors["norm.weight"] = subject.tensors["output_norm.weight"]
    tensors["d2t"] = subject.tensors["d2t"] - torch.arange(len(subject.tensors["d2t"]))
    write_files(tmp_path / "plain", config, tensors)
    plain = reference(name, tmp_path / "plain", eagle3.Eagle3Reference)
    same(logits(subject, STREAMS, TOKENS), logits(plain, STREAMS, TOKENS))


def test_both_sides_of_what_engines_disagree_on_can_be_taken(tmp_path: Path) -> None:
    subject = head("mtp/glm", tmp_path)
    assert isinstance(subject, mtp.NextnReference)
    plain = logits(subject, STREAMS, TOKENS)
    subject.zero_first = False
    unmasked = logits(subject, STREAMS, TOKENS)
    subject.after_final_norm = False
    assert differs(plain, unmasked) and differs(unmasked, logits(subject, STREAMS, TOKENS))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_value_fits_bfloat16(name: str, heads: Callable[[str], Any]) -> None:
    for key, tensor in heads(name).tensors.items():
        assert not tensor.is_floating_point() or torch.equal(tensor, tensor.bfloat16().float()), key
