"""The default model in float32 writes what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foredraft.llm import LLM
from foredraft.params import SamplingParams

NUM_TOKENS, LONGEST_PROMPT = 64, 400


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_prompts", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_greedy_text_is_that_of_transformers(default_model: Path, spec_bench: Path, num_prompts: int) -> None:
    """Prompts over all categories. By induction over the positions: at every one of our tokens, given those
    before it, transformers' best token is ours, so its greedy decoding writes the same text."""
    transformers = pytest.importorskip("transformers", reason="the reference")
    llm = LLM(str(default_model), dtype="float32")
    questions = [json.loads(line) for line in spec_bench.read_text().splitlines()]
    conversations = [[{"role": "user", "content": question["turns"][0]}] for question in questions]
    fitting = [c for c in conversations if len(llm.tokenizer.encode_chat(c)) <= LONGEST_PROMPT]
    chosen = fitting[:: len(fitting) // num_prompts][:num_prompts]
    outputs = llm.chat(chosen, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()
    for output in outputs:
        tokens = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == output.token_ids
    assert len(outputs) == num_prompts
