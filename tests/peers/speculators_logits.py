"""Runs in the environment of the speculators package, without Foredraft: loads an exported head and writes the logits
that the package computes.

    python speculators_logits.py HEAD INPUTS.safetensors LOGITS.safetensors

INPUTS holds `taps` [1, length, taps × hidden] and `tokens` [1, length], where row t has the token that follows
position t. LOGITS gets what the output head gives in every step: `logits.0`, `logits.1`, …, each [1, length,
draft_vocab].
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

folder, inputs_file, logits_file = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
inputs = load_file(inputs_file)
found: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda module, given, logits: found.append(logits.contiguous()))
with torch.no_grad():
    model(
        hidden_states=inputs["taps"],
        input_ids=inputs["tokens"],
        document_ids=torch.zeros_like(inputs["tokens"]),
        ttt_steps=3,
    )
save_file({f"logits.{step}": logits for step, logits in enumerate(found)}, logits_file)
