"""Tiny random models of every supported architecture, made with transformers and saved as it saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.backends.choose import choose_backend
from foredraft.batch import pack
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import load_decoder
from foredraft.params import SamplingParams
from foredraft.runtime.kv import KVCache
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work

VOCAB = 320
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.2 * i for i in range(8)],
    "original_max_position_embeddings": 512,
}


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="parity is measured against transformers")


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _transformers().LlamaConfig(**SMALL),
    "llama-tied": lambda: _transformers().LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-biased": lambda: _transformers().LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-3.1": lambda: _transformers().LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5),
    "llama-linear": lambda: _transformers().LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama-yarn": lambda: _transformers().LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-wide-head": lambda: _transformers().LlamaConfig(**SMALL, head_dim=32),
    "mistral": lambda: _transformers().MistralConfig(**SMALL, sliding_window=None),
    "mistral-sliding": lambda: _transformers().MistralConfig(**SMALL, sliding_window=50),
    "qwen2": lambda: _transformers().Qwen2Config(**SMALL),
    "qwen2-sliding": lambda: _transformers().Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen3": lambda: _transformers().Qwen3Config(**SMALL, head_dim=32),
    "smollm3": lambda: _transformers().SmolLM3Config(**{**SMALL, "num_hidden_layers": 5}),
    "phi3": lambda: _transformers().Phi3Config(**SMALL),
    "phi3-longrope": lambda: _transformers().Phi3Config(
        **SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=512
    ),
    "phi3-partial": lambda: _transformers().Phi3Config(**SMALL, partial_rotary_factor=0.5),
    "granite": lambda: _transformers().GraniteConfig(
        **SMALL, embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.22, logits_scaling=8.0
    ),
    "qwen3-moe": lambda: _transformers().Qwen3MoeConfig(
        **SMALL, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen3-moe-dense": lambda: _transformers().Qwen3MoeConfig(
        **SMALL, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=64, mlp_only_layers=[1], head_dim=32
    ),
    "gpt-oss": lambda: _transformers().GptOssConfig(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={**YARN, "rope_theta": 150000.0, "truncate": False},
    ),
    "gemma3": lambda: _transformers().Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 7}, head_dim=32, query_pre_attn_scalar=32, sliding_window=24
    ),
    "gemma3-scaled": lambda: _transformers().Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        query_pre_attn_scalar=16,
        sliding_window=33,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
}


def random_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, norms and biases included, so that a forgotten one shows. `changes` are
    fields of its config."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    model = _transformers().AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # Gemma's are multiplied, and are the output head too: larger ones would make every text repeat one token.
    embedding = 0.04 if hasattr(model.get_input_embeddings(), "embed_scale") else 1.0
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (embedding if "embed" in parameter_name else 0.15))
    return model


def save_model(model: Any, folder: Path) -> Path:
    """Save with a small tokenizer, so that the folder is a complete model."""
    tokenizers = pytest.importorskip("tokenizers")
    model.save_pretrained(folder)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *sorted(alphabet)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def all_logits(folder: Path, prompt: list[int], backend_name: str, device: str = "cpu") -> torch.Tensor:
    """Float32 logits of every position of a prompt that goes through the decoder in one run."""
    checkpoint = open_checkpoint(folder)
    backend = choose_backend(backend_name, "float32", torch.device(device), threads=2)
    decoder = load_decoder(checkpoint, "float32", checkpoint.config.max_position_embeddings, backend)
    kv = KVCache(num_blocks=32, block_size=16)
    runner = Runner(decoder, backend, kv.add_group("target", checkpoint.config, backend))
    params = SamplingParams(prompt_logprobs=0)  # asks for the logits of every prompt position
    blocks = list(range(31, -1, -1))
    sequence = Sequence(0, "", 0, prompt, len(prompt), params, seed=0, max_tokens=1, block_table=blocks)
    return runner.forward(pack([Work(sequence, len(prompt))], kv.block_size)).logits.cpu()
