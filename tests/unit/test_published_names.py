"""Random heads of every published layout have exactly the published tensor names."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import gguf
import pytest
from safetensors import safe_open

from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape

TARGET = TargetShape()

# Names as published. Braces list alternatives, as a shell expands them.
LAYER = "self_attn.{q,k,v,o}_proj.weight mlp.{gate,up,down}_proj.weight post_attention_layernorm.weight"
PLAIN = f"{LAYER} input_layernorm.weight"
FIRST = f"{PLAIN} hidden_norm.weight"
QWEN = f"{PLAIN} self_attn.{{q,k}}_norm.weight"
BLK = "attn_{q,k,v,output,norm}.weight ffn_{gate,up,down,norm}.weight"


def under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


EAGLE3 = "fc.weight norm.weight lm_head.weight"
EAGLE_MID = f"{EAGLE3} {under('midlayer', FIRST)} d2t t2d"
SPECULATORS = f"{EAGLE3} {under('layers.0', FIRST)} d2t t2d embed_tokens.weight"
ZLAB = f"fc.weight hidden_norm.weight norm.weight {under('layers.{0,1}', QWEN)}"
MARKOV = "markov_head.markov_w{1,2}.weight confidence_head.proj.{weight,bias}"
EAGLE1 = f"fc.weight {under('layers.0', LAYER)}"
MEDUSA = "blocks.{0,1,2}.layers.{0,1}.weight"
DENSE = f"model.embed_tokens.weight model.norm.weight lm_head.weight {under('model.layers.{0,1,2,3,4,5,6,7}', PLAIN)}"
QKV_BIAS = "self_attn.{q,k,v}_proj.bias"
GGUF_EAGLE3 = f"fc.weight output_norm.weight output.weight {under('blk.0', BLK)} blk.0.attn_norm_2.weight"
GGUF_NORMS = "enc.output_norm.weight output_norm.weight blk.{0,1}.attn_{q,k}_norm.weight"
GGUF_DFLASH = f"fc.weight {GGUF_NORMS} {under('blk.{0,1}', BLK)}"
DEEPSEEK = "model.layers.8.{enorm,hnorm,eh_proj,embed_tokens,shared_head.norm,shared_head.head}.weight"
QWEN_MTP = f"{under('mtp.layers.0', QWEN)} mtp.{{fc,norm,pre_fc_norm_hidden,pre_fc_norm_embedding}}.weight"
NAMES = {
    "eagle3/eagle": EAGLE_MID,
    "eagle3/eagle-narrow": f"{EAGLE_MID} embed_tokens.weight",
    "eagle3/specforge": EAGLE_MID,
    "eagle3/specforge-3.1": f"{EAGLE_MID} fc_norm.{{0,1,2}}.weight",
    "eagle3/nvidia": (
        f"{EAGLE3} {under('layers.0', FIRST)} d2t input_norm.weight layers.0.self_attn.{{q,k,v,o}}_proj.bias"
    ),
    "eagle3/speculators": SPECULATORS,
    "eagle3/speculators-norm-before-residual": SPECULATORS,
    "eagle3/speculators-3.1": f"{SPECULATORS} input_norm.weight",
    "eagle3/speculators-fc-norm": f"{SPECULATORS} fc_norm.{{0,1,2}}.weight",
    "eagle3/speculators-whole-vocabulary": (f"{EAGLE3} {under('layers.{0,1}', QWEN)} layers.0.hidden_norm.weight"),
    "eagle3/deepspec": f"{EAGLE3} {under('layers.0', QWEN)} layers.0.hidden_norm.weight embed_tokens.weight",
    "eagle3/peagle-vllm": f"{EAGLE_MID} mask_hidden {under('layers.1', PLAIN)}",
    "eagle3/peagle": f"{SPECULATORS} mask_hidden {under('layers.{1,2,3}', PLAIN)}",
    "eagle1/eagle1": EAGLE1,
    "eagle1/eagle1-bias": f"{EAGLE1} fc.bias",
    "eagle1/eagle1-bias-unsaid": f"{EAGLE1} fc.bias embed_tokens.weight",
    "eagle1/speculators": f"fusion_fc.weight {under('transformer', LAYER)}",
    "eagle1/speculators-bias": f"fusion_fc.{{weight,bias}} {under('transformer', LAYER)}",
    "eagle1/speculators-layernorms": (
        f"fusion_fc.weight {under('transformer', PLAIN)} {{embedding,pre_lm_head}}_layernorm.weight"
    ),
    "dflash/zlab": ZLAB,
    "dflash/zlab-block-size-nested": ZLAB,
    "dflash/zlab-sliding": ZLAB,
    "dflash/zlab-sliding-both-ways": ZLAB,
    "dflash/zlab-use-swa": ZLAB,
    "dflash/zlab-causal": ZLAB,
    "dflash/zlab-biases": f"{ZLAB} layers.{{0,1}}.self_attn.{{q,k,v,o}}_proj.bias",
    "dflash/zlab-yarn": ZLAB,
    "dflash/zlab-taps-unsaid": ZLAB.replace("{0,1}", "{0,1,2}"),
    "dflash/zlab-taps-unsaid-one-layer": ZLAB.replace("{0,1}", "0"),
    "dflash/speculators": f"{ZLAB} lm_head.weight d2t t2d",
    "dflash/speculators-from-anchor": f"{ZLAB} lm_head.weight d2t t2d embed_tokens.weight",
    "dflash/speculators-whole-vocabulary": ZLAB,
    "dflash/speculators-sliding": f"{ZLAB} lm_head.weight d2t t2d",
    "dflash/speculators-dspark": f"{ZLAB} lm_head.weight d2t t2d {MARKOV}",
    "dflash/speculators-dspark-own-position": f"{ZLAB} lm_head.weight d2t t2d {MARKOV}",
    "dflash/deepspec-dspark": f"{ZLAB} lm_head.weight embed_tokens.weight {MARKOV}",
    "dflash/deepspec-dspark-gated": (
        f"{ZLAB} lm_head.weight embed_tokens.weight {MARKOV} markov_head.gate_proj.{{weight,bias}}"
    ),
    "dflash/deepspec-dspark-bonus-anchor": f"{ZLAB} lm_head.weight embed_tokens.weight {MARKOV}",
    "medusa/old": "{0,1,2}.{0,1}.linear.{weight,bias} {0,1,2}.2.weight",
    "medusa/old-one-file": "{0,1,2}.{0,1}.linear.{weight,bias} {0,1,2}.2.weight",
    "medusa/new": f"{MEDUSA} lm_heads.{{0,1,2}}.weight",
    "medusa/new-bias": f"{MEDUSA} blocks.{{0,1,2}}.layers.{{0,1}}.bias lm_heads.{{0,1,2}}.weight",
    "medusa/new-shared": f"{MEDUSA} lm_head.weight",
    "medusa/new-shared-first": f"{MEDUSA} lm_heads.0.weight",
    "medusa/new-token-map": f"{MEDUSA} lm_heads.{{0,1,2}}.weight token_map",
    "medusa/new-token-map-whole-heads": f"{MEDUSA} lm_heads.{{0,1,2}}.weight token_map",
    "medusa/new-prefix": under("medusa_heads", f"{MEDUSA} lm_heads.{{0,1,2}}.weight token_map"),
    "mtp/glm": (
        f"{DENSE} {under('model.layers.8', PLAIN)} {under('model.layers.{0,1,2,3,4,5,6,7,8}', QKV_BIAS)} {DEEPSEEK}"
    ),
    "mtp/deepseek": f"{DENSE} {under('model.layers.8', PLAIN)} {DEEPSEEK}",
    "mtp/deepseek-own": f"{DENSE} {under('model.layers.8', PLAIN)} {DEEPSEEK}",
    "mtp/qwen3": f"{DENSE} model.layers.{{0,1,2,3,4,5,6,7}}.self_attn.{{q,k}}_norm.weight {QWEN_MTP}",
    "mtp/speculators": (
        f"{under('mtp_layers.0', QWEN)} "
        "mtp_layers.0.{token_layernorm,hidden_layernorm,final_layernorm,input_proj}.weight"
    ),
    "mtp/mimo": (
        f"{DENSE} {under('model.mtp_layers.0', PLAIN)} {under('model.mtp_layers.0', QKV_BIAS)} "
        f"{under('model.layers.{0,1,2,3,4,5,6,7}', QKV_BIAS)} "
        "model.mtp_layers.0.{token_layernorm,hidden_layernorm,final_layernorm,input_proj}.weight"
    ),
    "mtp/qwen3_5": (
        "model.language_model.embed_tokens.weight model.language_model.norm.weight lm_head.weight "
        f"{under('model.language_model.layers.{0,1,2,3,4,5,6,7}', QWEN)} {QWEN_MTP}"
    ),
    "gguf/eagle3": f"{GGUF_EAGLE3} d2t",
    "gguf/eagle3-norm-before-residual": f"{GGUF_EAGLE3} d2t",
    "gguf/eagle3-norm-before-fc": f"{GGUF_EAGLE3} d2t enc.output_norm.weight",
    "gguf/eagle3-whole-vocabulary": f"{GGUF_EAGLE3} token_embd.weight rope_freqs.weight",
    "gguf/eagle3-first": f"{GGUF_EAGLE3} d2t",
    **dict.fromkeys(("gguf/dflash", "gguf/dflash-anchor-unsaid"), GGUF_DFLASH),
    **dict.fromkeys(("gguf/dflash-causal", "gguf/dflash-causal-sliding", "gguf/dflash-sliding"), GGUF_DFLASH),
    **dict.fromkeys(
        ("gguf/dspark", "gguf/dspark-shuffled"),
        f"{GGUF_DFLASH} d2t output.weight markov_w{{1,2}}.weight conf_proj.{{weight,bias}}",
    ),
}


def expanded(pattern: str) -> set[str]:
    names: set[str] = set()
    for word in pattern.split():
        parts = re.split(r"\{([^}]*)\}", word)
        choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
        names |= {"".join(choice) for choice in product(*choices)}
    return names


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_have_exactly_the_published_names(name: str, tmp_path: Path) -> None:
    LAYOUTS[name].write(tmp_path, TARGET, 1)
    found: set[str] = set()
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    for file in tmp_path.glob("*.gguf"):
        found |= {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert found == expanded(NAMES[name])
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == found
