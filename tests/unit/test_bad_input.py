"""Bad input of every kind, each with the sentence that a person reads. Nothing of it reaches the engine loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.backends.choose import usable_cores
from foredraft.cli.main import run
from foredraft.config import EngineConfig
from foredraft.errors import ForedraftError, InvalidSpec
from foredraft.proposers import registry
from tests.tiny_models import VOCAB, random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_tokens=256, max_model_len=200)


PROMPTS: list[tuple[str, Callable[[LLM], Any], str]] = [
    ("empty text", lambda llm: llm.generate(""), "The prompt is empty; give at least one token."),
    ("empty ids among others", lambda llm: llm.generate([[1, 2], []]), "The prompt is empty; give at least one token."),
    (
        "id out of range",
        lambda llm: llm.generate([[1, VOCAB]]),
        f"The prompt has token ids that the model does not have; allowed are 0 to {VOCAB - 1}.",
    ),
    (
        "negative id",
        lambda llm: llm.generate([-1, 3]),
        f"The prompt has token ids that the model does not have; allowed are 0 to {VOCAB - 1}.",
    ),
    (
        "too long",
        lambda llm: llm.generate([[1] * 200]),
        "The prompt has 200 tokens, but the context holds 200 including the answer; shorten it or raise max_model_len.",
    ),
    ("a number", lambda llm: llm.generate(7), "prompts must be a text, token ids, or a list of those, not int."),
    (
        "a nested number",
        lambda llm: llm.generate(["a", 7]),
        "A prompt must be a text, a list of token ids or a list of messages, not int.",
    ),
    (
        "bias beyond the vocabulary",
        lambda llm: llm.generate("a", SamplingParams(logit_bias={VOCAB: 1.0})),
        f"logit_bias has token ids that the model does not have; allowed are 0 to {VOCAB - 1}.",
    ),
    (
        "stop token beyond the vocabulary",
        lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[VOCAB])),
        f"stop_token_ids has token ids that the model does not have; allowed are 0 to {VOCAB - 1}.",
    ),
    (
        "params of another length",
        lambda llm: llm.generate(["a"], [SamplingParams()] * 2),
        "params has 2 entries for 1 prompts; give one for all, or one each.",
    ),
    (
        "params of another type",
        lambda llm: llm.generate("a", {"max_tokens": 3}),
        "params must be a SamplingParams or a list of them, not dict.",
    ),
    (
        "unknown proposer",
        lambda llm: llm.generate("a", spec="oracle"),
        "spec='oracle' names the proposer 'oracle'; there are dflash, draft_model, eagle, early_exit, grammar, "
        "lookahead, medusa, mtp, ngram, prediction, quantised, staged, suffix.",
    ),
    (
        "unknown proposer option",
        lambda llm: llm.generate("a", spec="ngram:depth=3"),
        "ngram has no option 'depth'; it has k, min_n, max_n, which.",
    ),
    (
        "proposer option of another type",
        lambda llm: llm.generate("a", spec="ngram:k=many"),
        "ngram: k='many' must be of type int.",
    ),
    (
        "proposer option out of range",
        lambda llm: llm.generate("a", spec="ngram:k=0"),
        "ngram: k=0 must be from 1 to 64.",
    ),
    (
        "proposer option twice",
        lambda llm: llm.generate("a", spec="ngram:k=6,k=8"),
        "spec='ngram:k=6,k=8' gives the option 'k' twice.",
    ),
    (
        "tree of another proposer",
        lambda llm: llm.generate("a", spec="suffix:tree=static"),
        "suffix: tree='static' must be dynamic or chain.",
    ),
    (
        "store without bounds",
        lambda llm: llm.generate("a", spec="suffix:store=1000000000000"),
        "suffix: min_score=0.1 must lie between 0 and 1, depth=3.0 above 0 and up to 64, store=1000000000000 from 0 to "
        "10000000.",
    ),
    (
        "more trust in earlier answers than in the sequence itself",
        lambda llm: llm.generate("a", spec="suffix:store_doubt=0.5"),
        "suffix: store_doubt=0.5 must be from 1 to 64.",
    ),
    (
        "proposer that cannot be chosen",
        lambda llm: llm.generate("a", spec="auto(lookahead)"),
        "spec='auto(lookahead)': lookahead needs its whole draft verified, so auto cannot choose it.",
    ),
    (
        "length of the last stage",
        lambda llm: llm.generate("a", spec="staged:chain=ngram>quantised(k=3)"),
        "staged: quantised is the last stage, so its k is that of staged: write staged:k=….",
    ),
    (
        "unreadable spec",
        lambda llm: llm.generate("a", spec="+"),
        "spec='+' cannot be read; it must be off, auto, NAME, NAME:option=value,…, NAME+NAME, or auto(NAME+NAME).",
    ),
    (
        "chat of nothing",
        lambda llm: llm.chat([]),
        "chat needs a text, token ids, a list of messages, each with a role and a content, or a list of those.",
    ),
    (
        "chat with an empty conversation",
        lambda llm: llm.chat([[]]),
        "Every conversation must be a text, token ids, or a list of messages with a role and a content, and not empty.",
    ),
    (
        "chat of a number",
        lambda llm: llm.chat(7),
        "chat needs a text, token ids, a list of messages, each with a role and a content, or a list of those.",
    ),
    (
        "chat of nothing said",
        lambda llm: llm.chat(""),
        "chat needs a text, token ids, a list of messages, each with a role and a content, or a list of those.",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), [p[1:] for p in PROMPTS], ids=[p[0] for p in PROMPTS])
def test_bad_prompts(llm: LLM, call: Callable[[LLM], Any], sentence: str) -> None:
    with pytest.raises(ForedraftError) as caught:
        call(llm)
    assert str(caught.value) == sentence
    assert not llm.engine.has_work, "nothing was left behind"
    assert (
        llm.generate([3, 4, 5], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))[0].finish_reason
        == "length"
    )


def test_a_request_that_can_never_fit_is_refused(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_tokens=32, max_model_len=32)
    llm.engine.max_model_len = 64  # as if the context were longer than the cache
    with pytest.raises(
        ForedraftError, match="needs 50 tokens of KV cache, but there are only 32; raise kv_cache_tokens"
    ):
        llm.generate([[1] * 30], SamplingParams(max_tokens=20))


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float16"}, "dtype='float16' is not known; use auto, float32, bfloat16, int8, int4."),
    ({"activations": "int4"}, "activations='int4' is not known; use auto, int8, int16."),
    (
        {"activations": "int8", "backend": "torch"},
        "activations='int8' needs the native kernels, which do not serve here; use activations='auto'.",
    ),
    ({"device": "tpu9"}, "device='tpu9' is not known; use auto, cpu or cuda."),
    ({"backend": "jax"}, "backend='jax' is not known; use auto, native, torch, cuda."),
    ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1."),
    ({"threads": 0}, "threads=0 must be a whole number from 1 to 256."),
    ({"threads": -1}, "threads=-1 must be a whole number from 1 to 256."),
    ({"threads": 300}, "threads=300 must be a whole number from 1 to 256."),
    ({"threads": 2.0}, "threads=2.0 must be a whole number from 1 to 256."),
    ({"threads": True}, "threads=True must be a whole number from 1 to 256."),
    ({"threads": "4"}, "threads='4' must be a whole number from 1 to 256."),
    ({"max_num_seqs": 1.5}, "max_num_seqs=1.5 must be a whole number of at least 1."),
    ({"max_chunk_s": 0}, "max_chunk_s=0 must be a number of seconds above 0."),
    ({"max_chunk_s": "fast"}, "max_chunk_s='fast' must be a number of seconds above 0."),
    ({"max_chunk_s": float("nan")}, "max_chunk_s=nan must be a number of seconds above 0."),
    ({"max_chunk_s": 10**400}, "max_chunk_s is too large a whole number; use float('inf') to set no limit."),
    ({"exact": "no"}, "exact='no' must be True or False."),
    ({"prefix_caching": 0}, "prefix_caching=0 must be True or False."),
    ({"prefix_salt": b"x"}, "prefix_salt=b'x' must be a text."),
    ({"device": 0}, "device=0 must be a text: auto, cpu or cuda."),
    ({"max_model_len": 100000}, "max_model_len=100000 is beyond the 512 positions that the model knows."),
    (
        {"spec": 3},
        "spec=3 must be a string such as off, auto, NAME, NAME:option=value,…, NAME+NAME, or auto(NAME+NAME).",
    ),
    (
        {"max_num_batched_tokens": 4},
        "max_num_batched_tokens=4 is below max_num_seqs=64: every running sequence needs one row per step; "
        "raise the first or lower the second.",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS, ids=lambda value: str(value)[:40])
def test_bad_engine_options(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ForedraftError) as caught:
        LLM(str(folder), **options)
    assert str(caught.value) == sentence


def test_many_sequences_get_as_many_rows() -> None:
    assert EngineConfig().rows_per_step == 512
    assert EngineConfig(max_num_seqs=600).rows_per_step == 600
    assert EngineConfig(max_num_seqs=6, max_num_batched_tokens=7).rows_per_step == 7


@pytest.mark.parametrize("model", [123, None, b"smollm2-135m", ["smollm2-135m"]])
def test_a_model_is_named_by_text(model: Any) -> None:
    with pytest.raises(ForedraftError) as caught:
        LLM(model)
    assert str(caught.value) == f"model={model!r} is not the name of a model; {NOWHERE}"


def test_a_head_that_there_is_not(folder: Path) -> None:
    with pytest.raises(ForedraftError, match="There is no head 'nosuch'; give"):
        LLM(str(folder), head="nosuch")


def test_threads_are_by_default_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert usable_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(384)}, raising=False)
    assert usable_cores() == 256, "the kernels take no more"
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


NOWHERE = (
    "give a catalogue name, a .gguf file, a folder with config.json and .safetensors files, or a hub id 'org/name'."
)
FILES: list[tuple[str, bytes | None, str]] = [
    ("missing.gguf", None, f"There is no model '{{path}}'; {NOWHERE}"),
    ("notes.txt", b"x", "{path} does not start with 'GGUF', so it is not a GGUF file; give one."),
    ("empty.gguf", b"", "{path} is empty; download the GGUF file again."),
    ("text.gguf", b"not a model, really", "{path} does not start with 'GGUF', so it is not a GGUF file; give one."),
    (
        "weights.bin",
        b"x",
        "{path} is a pickle, which can run any code when it is opened, so it is refused; "
        "use the .safetensors or .gguf version of the model.",
    ),
    (
        "folder/config.json",
        b'{"model_type": "mamba"}',
        "{path}: model_type is 'mamba', but Foredraft runs llama, mistral, qwen2, qwen3, qwen3_moe, mimo, smollm3, "
        "phi3, granite, gemma3_text, gpt_oss; choose a model of one of these families.",
    ),
]


@pytest.mark.parametrize(("name", "content", "sentence"), FILES, ids=[file[0] for file in FILES])
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    model = path.parent if path.name == "config.json" else path
    with pytest.raises(ForedraftError) as caught:
        LLM(str(model))
    assert str(caught.value) == sentence.format(path=path)


COMMANDS: list[tuple[str, str]] = [
    ("generate x --dtype int3", "dtype='int3' is not known; use auto, float32, bfloat16, int8, int4."),
    ("generate x --threads 300", "threads=300 must be a whole number from 1 to 256."),
    ("generate x --model smollm2-135", f"There is no model 'smollm2-135' (did you mean 'smollm2-135m'?); {NOWHERE}"),
]


@pytest.mark.parametrize(("command", "sentence"), COMMANDS, ids=[command[0] for command in COMMANDS])
def test_bad_options_of_a_model_on_the_command_line(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["foredraft", *command.split()])
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == sentence + "\n"
    assert printed.out == ""


def test_offered_proposers_that_cannot_be_had_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, value, "foredraft.proposers") for name, value in OFFERED]
    monkeypatch.setattr(registry, "_offered", lambda: EntryPoints(points))
    with pytest.raises(InvalidSpec, match=r"'twice' is offered by one:Twice and two:Twice; uninstall one"):
        registry.parse_spec("twice")
    with pytest.raises(InvalidSpec, match=r"'absent' of no_such_package:Absent cannot be loaded: No module named"):
        registry.parse_spec("ngram+absent")


OFFERED = [("twice", "one:Twice"), ("twice", "two:Twice"), ("absent", "no_such_package:Absent")]
