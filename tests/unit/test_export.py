"""Exported heads hold our tensors under the names and with the settings of other engines; what an engine has no place
for is refused with one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.cli import main
from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.heads.base import HeadConfig
from foredraft.heads.catalog import find_heads
from foredraft.heads.engines import Engine
from foredraft.heads.export import Exported, export
from foredraft.heads.files import read_tensors
from foredraft.models.catalog import hub_name, open_checkpoint
from tests.gguf_files import convert_to_gguf
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

VERIFIER = "org/tiny"
ENGINES = [engine for engine in Engine if not engine.is_of_models]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


def trained(folder: Path, model: Path, kind: str, **changes: Any) -> Path:
    """A head as training writes it: a Medusa head's norm and the masks of a DFlash head are the target's."""
    head = random_head(tiny_config(kind, model, **changes))
    if head.config.block_input == "masked":
        embedding = open_checkpoint(model).weight("model.embed_tokens.weight").dense()
        head.mask_embedding.weight.copy_(embedding[head.config.mask_token_id])
    if kind == "medusa":
        head.norm.weight.copy_(open_checkpoint(model).vector("model.norm.weight"))
    return save_head(head, folder, torch.bfloat16)


def exported(head: Path, engine: str, out: Path, model: Path) -> tuple[dict[str, Any], dict[str, Tensor], Exported]:
    done = export(head, Engine(engine), out, open_checkpoint(model), VERIFIER)
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors"), done


def ours(head: Path) -> dict[str, Tensor]:
    return read_tensors(head, HeadConfig.read(head))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_eagle_head_comes_back(engine: str, model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "eagle", taps=(1, 2))
    config, tensors, _ = exported(head, engine, tmp_path / "out", model)
    if engine == "speculators":
        embedding = open_checkpoint(model).weight("model.embed_tokens.weight").dense()
        assert torch.equal(tensors.pop("embed_tokens.weight"), embedding.bfloat16())
    back = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    assert equal(back, ours(head))
    layers = config.get("transformer_layer_config", config)
    assert (layers["model_type"], layers["num_hidden_layers"], layers["head_dim"]) == ("llama", 1, 16)
    assert (layers["rope_theta"], layers["max_position_embeddings"]) == (10000.0, 512)
    assert layers["num_aux_hidden_states"] == 2
    assert layers["vocab_size"] == VOCAB and config["draft_vocab_size"] == 256
    assert config["norm_before_residual"] is False
    assert config["torch_dtype"] == "bfloat16" and not config["tie_word_embeddings"]


@pytest.mark.parametrize("engine", ENGINES)
def test_mapped_tokens_get_rows_of_their_own(engine: str, model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "eagle", taps=(1, 2), mapped_vocab_size=100)
    _, tensors, _ = exported(head, engine, tmp_path / "out", model)
    own = ours(head)
    rows = open_checkpoint(model).weight("lm_head.weight").dense().float()[own["t2d"]]
    assert torch.equal(tensors["lm_head.weight"][~own["mapped"]], own["lm_head.weight"])
    expected = rows[own["mapped"]] @ own["output_map.weight"].float().T
    assert torch.allclose(tensors["lm_head.weight"][own["mapped"]].float(), expected, rtol=1e-2, atol=1e-6)
    assert not {"mapped", "output_map.weight"} & tensors.keys()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_transformers_reads_the_config_as_both_engines_do(engine: str, model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    head = trained(tmp_path / "head", model, "eagle", taps=(1, 2), rope_theta=5000.0, norm_eps=1e-4)
    exported(head, engine, tmp_path / "out", model)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["LlamaForCausalLMEagle3"] and config.rope_parameters["rope_theta"] == 5000.0
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (16, 2, 1e-4)
    assert (config.draft_vocab_size, config.num_aux_hidden_states, config.norm_before_residual) == (256, 2, False)


def test_every_engine_numbers_the_taps_its_own_way(model: Path, tmp_path: Path) -> None:
    """Tap k is the stream after k layers; SGLang counts layers from 0 and means their outputs."""
    head = trained(tmp_path / "head", model, "eagle", taps=(0, 2))
    vllm, sglang, speculators = (exported(head, engine, tmp_path / engine, model)[0] for engine in ENGINES)
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert speculators["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 1]
    assert "eagle_aux_hidden_state_layer_ids" not in sglang


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_of_the_whole_vocabulary_has_no_map(engine: str, model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "eagle", taps=(1, 2), draft_vocab_size=VOCAB)
    _, tensors, _ = exported(head, engine, tmp_path / "out", model)
    assert not tensors.keys() & {"d2t", "t2d"}


def test_speculators_are_told_the_target_and_the_length(model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "eagle", block=3)
    config, _, done = exported(head, "speculators", tmp_path / "out", model)
    told = config["speculators_config"]
    assert config["speculators_model_type"] == told["algorithm"] == "eagle3"
    assert told["verifier"]["name_or_path"] == VERIFIER
    assert told["proposal_methods"][0]["speculative_tokens"] == 3
    assert done.command == f"vllm serve {tmp_path / 'out'}"


def test_a_medusa_head_comes_back(model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "medusa")
    config, tensors, done = exported(head, "vllm", tmp_path / "out", model)
    token_map = tensors.pop("token_map")
    norm = open_checkpoint(model).vector("model.norm.weight").bfloat16()
    d2t = token_map - torch.arange(len(token_map))
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[token_map] = True
    assert equal({**tensors, "norm.weight": norm, "d2t": d2t, "t2d": t2d}, ours(head))
    assert (config["num_heads"], config["num_hidden_layers"], config["truncated_vocab_size"]) == (4, 2, 256)
    assert config["medusa_fc_bias"] and config["original_lm_head"]
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert '"num_speculative_tokens": 4' in done.command and '"enable_weights_track": false' in done.command


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("correction", ["none", "markov"])
def test_a_dflash_head_comes_back_from_dspark(engine: str, correction: str, model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "dflash", correction=correction, block_input="masked", mask_token_id=9)
    config, tensors, done = exported(head, engine, tmp_path / "out", model)
    if correction == "none":
        assert not any(tensors.pop(f"markov_head.markov_{part}.weight").any() for part in ("w1", "w2"))
    back = {name.removesuffix(".weight") if "markov" in name else name: tensor for name, tensor in tensors.items()}
    mask = open_checkpoint(model).weight("model.embed_tokens.weight").dense()[9:10].bfloat16()
    assert equal({**back, "mask_embedding.weight": mask}, ours(head))
    assert (config["mask_token_id"], config["block_size"], config["sample_from_anchor"]) == (9, 6, True)
    assert config["markov_rank"] == (1 if correction == "none" else 32)
    if engine == "vllm":
        assert config["eagle_aux_hidden_state_layer_ids"] == [0, 3] and config["target_layer_ids"] == [-1, 2]
        assert '"method": "dspark"' in done.command and '"num_speculative_tokens": 6' in done.command
    else:
        assert config["aux_hidden_state_layer_ids"] == [0, 3]
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6


def test_a_draft_model_is_copied(model: Path, tmp_path: Path) -> None:
    """It is a Llama folder already."""
    for engine, word in (("vllm", "draft_model"), ("sglang", "STANDALONE")):
        done = export(model, Engine(engine), tmp_path / engine, open_checkpoint(model), VERIFIER)
        assert done.kind == "draft" and word in done.command
        names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert names <= {file.name for file in (tmp_path / engine).iterdir()}
        assert all((tmp_path / engine / name).read_bytes() == (model / name).read_bytes() for name in names)


def last_layer(folder: Path, model: Path) -> Path:
    return trained(folder, model, "eagle", taps=(1, 3))


def other_norm(folder: Path, model: Path) -> Path:
    return save_head(random_head(tiny_config("medusa", model)), folder)


def falling_taps(folder: Path, model: Path) -> Path:
    return trained(folder, model, "eagle", taps=(2, 1))


@pytest.mark.parametrize("engine", [Engine.deepseek, Engine.qwen])
@pytest.mark.parametrize("name", ["llama", "llama-3.1", "qwen2", "qwen3", "mistral-sliding"])
def test_an_mtp_layer_becomes_part_of_its_model(engine: Engine, name: str, tmp_path: Path) -> None:
    model = save_model(random_model(name), tmp_path / "model")
    target = open_checkpoint(model)
    sizes = {
        "qk_norm": target.config.qk_norm,
        "head_dim": target.config.head_dim,
        "norm_eps": target.config.rms_norm_eps,
    }
    head = trained(tmp_path / "head", model, "mtp", **sizes, acceptance=(0.75, 0.5))
    done = export(head, engine, tmp_path / "out", target, VERIFIER)
    assert done.kind == "mtp" and done.command == f"foredraft chat --model {tmp_path / 'out'}"
    copy = open_checkpoint(tmp_path / "out")
    (files,) = find_heads("auto", copy).values()
    assert equal(dict(files.read()), ours(head)) and files.config.shares_output  # type: ignore[arg-type]
    assert files.config.acceptance == (0.75, 0.5)
    assert find_heads(str(head), copy), "what was trained for the model fits its copy"
    assert replace(copy.config, num_mtp_layers=0) == target.config and copy.generation == target.generation
    assert copy.names() == target.names()
    assert all(torch.equal(copy.weight(name).dense(), target.weight(name).dense()) for name in target.names())
    assert copy.tokenizer().encode("abc") == target.tokenizer().encode("abc")


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_a_gguf_model_becomes_a_folder_with_its_layer(name: str, tmp_path: Path) -> None:
    file = convert_to_gguf(random_model(name), tmp_path / "model.gguf")
    target = open_checkpoint(file)
    sizes = {
        "qk_norm": target.config.qk_norm,
        "head_dim": target.config.head_dim,
        "norm_eps": target.config.rms_norm_eps,
    }
    head = trained(tmp_path / "head", file, "mtp", **sizes)
    export(head, Engine.deepseek, tmp_path / "out", target, VERIFIER)
    copy = open_checkpoint(tmp_path / "out")
    assert find_heads("auto", copy).keys() == {"mtp"} and find_heads(str(head), copy)
    assert replace(copy.config, num_mtp_layers=0) == target.config
    for name in target.names():
        assert torch.equal(copy.weight(name).dense().flatten(), target.weight(name).dense().flatten())


def test_a_gguf_model_that_a_config_cannot_describe(tmp_path: Path) -> None:
    file = convert_to_gguf(random_model("llama-3.1"), tmp_path / "model.gguf")
    head = trained(tmp_path / "head", file, "mtp", norm_eps=open_checkpoint(file).config.rms_norm_eps)
    with pytest.raises(InvalidModel, match=r"no plain config\.json describes, .* give the folder of its .safetensors"):
        export(head, Engine.qwen, tmp_path / "out", open_checkpoint(file), VERIFIER)


def medusa(folder: Path, model: Path) -> Path:
    return trained(folder, model, "medusa")


def injected(folder: Path, model: Path) -> Path:
    return trained(folder, model, "dflash", correction="markov")


def refiner(folder: Path, model: Path) -> Path:
    return trained(folder, model, "dflash", correction="refiner", block_input="masked")


def masked(folder: Path, model: Path) -> Path:
    return trained(folder, model, "dflash", correction="markov", block_input="masked")


def other_masks(folder: Path, model: Path) -> Path:
    return save_head(random_head(tiny_config("dflash", model, block_input="masked")), folder)


def mtp(folder: Path, model: Path) -> Path:
    return trained(folder, model, "mtp")


def of_another_model(folder: Path, model: Path) -> Path:
    return trained(folder, model, "eagle", target_digest="0")


@pytest.mark.parametrize(
    ("make", "engine", "sentence"),
    [
        (medusa, "sglang", "SGLang knows no Medusa heads; export this one to vllm, or .* `foredraft train eagle`"),
        (medusa, "speculators", "The speculators format knows no Medusa heads"),
        (other_norm, "vllm", "this head reads something else; train one with `foredraft train medusa`"),
        (
            injected,
            "vllm",
            "vLLM has no place for the norms .* `foredraft train dflash:input=masked,correction=markov`",
        ),
        (refiner, "speculators", "The speculators format has no place for a refiner; .*input=masked,correction=markov"),
        (other_masks, "vllm", "takes the target's embedding of token 0 for masks, but this head has another"),
        (injected, "sglang", "SGLang has no place for the norms .*input=masked,correction=markov"),
        (masked, "sglang", "SGLang's DFlash and DSpark use the target's output head"),
        (last_layer, "sglang", "SGLang cannot read the residual stream after the target's last layer"),
        (falling_taps, "vllm", r"the taps \[2, 1\] do not rise"),
        (mtp, "qwen", "norm_eps is 1e-05, but a layer inside .* is one of its own kind, with 1e-06; train one"),
        (mtp, "vllm", "is an mtp layer, which engines read out of a model's own files; export it to deepseek or qwen"),
        (last_layer, "qwen", "Qwen's layout is that of models with an mtp layer inside, but .* is of the kind eagle"),
        (lambda folder, model: model, "deepseek", "is of the kind draft; those of heads are vllm, sglang"),
        (of_another_model, "vllm", "whose weights are not those of"),
        (lambda folder, model: model, "speculators", "is a draft model, a Llama of its own"),
        (lambda folder, model: folder, "vllm", "has no config.json"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    make: Callable[[Path, Path], Path], engine: str, sentence: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=sentence):
        export(make(tmp_path / "head", model), Engine(engine), tmp_path / "out", open_checkpoint(model), VERIFIER)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", model, "eagle")
    with pytest.raises(InvalidParameter, match="is there already"):
        export(head, Engine.vllm, head, open_checkpoint(model), VERIFIER)


def test_the_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, out = trained(tmp_path / "head", model, "eagle"), tmp_path / "out"
    words = ["foredraft", "export", str(head), str(out), "--to", "vllm", "--model", str(model), "--json"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "eagle" and record["engine"] == "vllm" and record["folder"] == str(out)
    assert record["command"].startswith(f"vllm serve {model} --speculative-config")
    assert (out / "config.json").exists()


def test_other_engines_know_models_by_their_hub_ids(model: Path) -> None:
    assert hub_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub_name("org/name") == "org/name"
    assert hub_name(str(model)) == str(model.resolve())
