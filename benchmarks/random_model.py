"""Writes a model of random weights in a known shape, as a safetensors folder, for measurements of speed.

python benchmarks/random_model.py 8b /tmp/8b
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# hidden, layers, heads, KV heads, head size, FFN, vocabulary, tied output head
SHAPES = {
    "135m": (576, 30, 9, 3, 64, 1536, 49152, True),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
}


def write(shape: str, folder: Path) -> None:
    """Shards of one layer each, so that no more than a layer is held in memory."""
    hidden, layers, heads, kv_heads, head_dim, ffn, vocab, tied = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).to(torch.bfloat16)

    def save(shard: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / shard)
        places.update(dict.fromkeys(tensors, shard))

    for index in range(layers):
        prefix = f"model.layers.{index}"
        linears = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        tensors = {f"{prefix}.{name}.weight": matrix(*size) for name, size in linears.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        save(f"layer-{index:03}.safetensors", tensors)
    ends = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    if not tied:
        ends["lm_head.weight"] = matrix(vocab, hidden)
    save("ends.safetensors", ends)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """One token per byte: the model's other tokens have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.folder)
