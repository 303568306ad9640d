"""Runs in the environment of the speculators package, without Foredraft: loads an exported head and writes the logits
that the package computes.

    python speculators_logits.py HEAD INPUTS.safetensors LOGITS.safetensors

INPUTS holds `taps` [1, length, taps × hidden] and `tokens` [1, length]. For an EAGLE head, row t has the token that
follows position t, and LOGITS gets those of three steps: `logits.0` and so on, each [1, length, draft_vocab]. For a
block drafter, INPUTS has an `anchor` [1] too, and LOGITS gets those of its block: `logits.0` [1, block, draft_vocab].
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config

folder, inputs_file, logits_file = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
inputs = load_file(inputs_file)
tokens = inputs["tokens"]
found: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda module, given, logits: found.append(logits.contiguous()))
given = {"hidden_states": inputs["taps"], "input_ids": tokens, "document_ids": torch.zeros_like(tokens)}
with torch.no_grad():
    if "anchor" in inputs:
        model.markov_head.markov_w2.register_forward_hook(lambda module, given, added: found[0].add_(added))
        only = torch.zeros_like(tokens)  # the one place from which the package can choose an anchor
        only[:, inputs["anchor"]] = 1
        unused = torch.zeros(1, tokens.shape[1], config.transformer_layer_config.hidden_size)
        losses = {"loss_config": resolve_loss_config("kl_div", "eager")}  # the default ones need a GPU
        losses["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
        model(**given, **losses, loss_mask=only, verifier_last_hidden_states=unused, max_anchors=1)
    else:
        model(**given, ttt_steps=3)
save_file({f"logits.{step}": logits for step, logits in enumerate(found)}, logits_file)
