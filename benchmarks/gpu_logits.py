"""How far a GPU's logits are from those of the float32 model, beside those of transformers in bfloat16.

    python benchmarks/gpu_logits.py [--model smollm2-135m] [--suite FILE.jsonl] [--prompts 12] [--dtypes bfloat16,int4]

The reference is transformers in float32, with the weights of the file (those of 4 bits are widened, not rounded). All
positions of the prompts count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.batch import pack
from foredraft.bench.suite import load_suite
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.types import Sequence, Work


def peer(model: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model of a file in transformers."""
    checkpoint = open_checkpoint(resolve(model))
    config = checkpoint.config
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    state = {name: checkpoint.weight(name).dense() for name in checkpoint.names()}
    state = {name: value.flatten() if "norm" in name else value for name, value in state.items()}
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return peer.to("cuda", dtype).eval()


def own_logits(llm: LLM, prompts: list[list[int]]) -> Iterator[Tensor]:
    """[tokens, vocab] of every prompt."""
    kv, params = llm.engine.kv, SamplingParams(prompt_logprobs=0).resolved({})
    for prompt in prompts:
        blocks = list(range(-(-len(prompt) // kv.block_size)))
        sequence = Sequence(-1, "", 0, prompt, len(prompt), params, seed=0, max_tokens=1, block_table=blocks)
        yield llm.engine.runner.forward(pack([Work(sequence, len(prompt))], kv.block_size)).logits.clone()


@torch.inference_mode()
def report(name: str, reference: list[Tensor], found: list[Tensor]) -> None:
    divergences, agreements = [], []
    for expected, logits in zip(reference, found, strict=True):
        p, q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        agreements.append((expected.argmax(-1) == logits.argmax(-1)).double())
    divergence, agreement = torch.cat(divergences), torch.cat(agreements)
    print(
        f"{name}: {len(divergence)} positions, mean KL {divergence.mean():.2e}, p99 {divergence.quantile(0.99):.2e}, "
        f"same top token {agreement.mean():.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--dtypes", default="bfloat16,int4")
    options = parser.parse_args()
    tokenizer = open_checkpoint(resolve(options.model)).tokenizer()
    questions = load_suite(options.suite, options.prompts)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question.text}]) for question in questions]
    results: dict[str, list[Tensor]] = {}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            model = peer(options.model, dtype)
            results[str(dtype)] = [model(torch.tensor([prompt], device="cuda")).logits[0] for prompt in prompts]
            del model
    reference = results[str(torch.float32)]
    report("transformers bfloat16", reference, results[str(torch.bfloat16)])
    for dtype in options.dtypes.split(","):
        llm = LLM(options.model, device="cuda", dtype=dtype, spec="off", max_model_len=2048, kv_cache_tokens=4096)
        report(f"foredraft {dtype}", reference, list(own_logits(llm, prompts)))


if __name__ == "__main__":
    main()
