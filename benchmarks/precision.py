"""What rounding gives up: how far the next token's distribution is from that of the same file with float32 weights and
activations, on text that the model writes itself.

    python benchmarks/precision.py [--model smollm2-135m] [--dtype int4] [--dtype bfloat16] [--device cuda]
        [--positions 1000] [--llama PYTHON]

All texts begin with the same system prompt. A position counts once: where an earlier text has the same tokens up to it,
it is left out. Otherwise the few tokens of that prompt decide the mean. Quantised weights are measured with 8-bit and
with 16-bit activations on a CPU. --llama names a Python that has llama-cpp-python: its distributions on the same GGUF
file and tokens are then compared too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.audit.prompts import BUILT_IN
from foredraft.batch import pack
from foredraft.bench.suite import built_in
from foredraft.models.catalog import resolve
from foredraft.types import Sequence, Work

LENGTH = 256  # tokens of a text
QUANTISED = ("int4", "int8")

LLAMA = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, texts, out = sys.argv[1:]
texts = json.load(open(texts))
llama = Llama(model, n_ctx=max(map(len, texts)), n_batch=512, n_threads=2, logits_all=True, verbose=False)
rows = []
for tokens in texts:
    llama.reset()
    llama.eval(tokens)
    rows.append(llama.scores[: len(tokens)].copy())
np.save(out, np.concatenate(rows).astype(np.float32))
"""


def texts_of(llm: LLM, positions: int) -> list[list[int]]:
    """Prompts with the model's own greedy answers, cut to LENGTH tokens, as many as are needed."""
    prompts = [question.encoded(llm) for question in (*BUILT_IN, *built_in())[: -(-positions // LENGTH)]]
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    return [[*prompt, *output.token_ids][:LENGTH] for prompt, output in zip(prompts, outputs, strict=True)]


def new_positions(texts: list[list[int]]) -> Tensor:
    """The positions, counted through all texts, that no earlier text shares."""
    prefixes = [tuple(tokens[: end + 1]) for tokens in texts for end in range(len(tokens))]
    first = {prefix: place for place, prefix in reversed(list(enumerate(prefixes)))}
    return torch.tensor(sorted(first.values()))


def logits_of(llm: LLM, texts: list[list[int]]) -> Tensor:
    """[positions, vocabulary]"""
    engine, rows = llm.engine, []
    for tokens in texts:
        sequence = Sequence(-1, "", 0, tokens, len(tokens), SamplingParams(temperature=0).resolved({}), 0, 1)
        assert engine.scheduler.pool.reserve(sequence, len(tokens))
        batch = pack([Work(sequence, len(tokens))], engine.kv.block_size)
        rows.append(engine.runner.forward(batch._replace(logit_rows=None)).logits.cpu().clone())
        engine.scheduler.pool.free(sequence)
    return torch.cat(rows)


def llama_logits(python: str, model: str, texts: list[list[int]]) -> Tensor:
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "texts.json", Path(folder) / "logits.npy"
        source.write_text(json.dumps(texts))
        subprocess.run([python, "-c", LLAMA, str(resolve(model)), str(source), str(out)], check=True)
        return torch.from_numpy(np.load(out))


def report(name: str, logits: Tensor, reference: Tensor) -> None:
    right, found = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = (right.exp() * (right - found)).sum(-1).double()
    same = (reference.argmax(-1) == logits.argmax(-1)).double().mean()
    error = kl.std() / len(kl) ** 0.5
    figures = f"mean KL {kl.mean():.3e} +- {error:.0e}   p99 {kl.quantile(0.99):.2e}"
    print(f"{name:28} {figures}   same best token {100 * same:.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    arguments = parser.parse_args()

    def opened(device: str, dtype: str, activations: str = "int8") -> LLM:
        options = {"dtype": dtype, "activations": activations, "device": device, "threads": arguments.threads}
        return LLM(arguments.model, spec="off", max_model_len=1024, **options)

    reference = opened("cpu", "float32")
    texts = texts_of(reference, arguments.positions)
    counted = new_positions(texts)
    right = logits_of(reference, texts)[counted]
    print(f"{arguments.model}, {len(right)} positions of {len(texts)} texts, beside the same file in float32")
    for dtype in arguments.dtype or ("int4",):
        rounds_activations = dtype in QUANTISED and arguments.device == "cpu"
        for activations in ("int8", "int16") if rounds_activations else ("int8",):
            llm = opened(arguments.device, dtype, activations)
            name = f"{dtype}, {activations} activations" if rounds_activations else f"{dtype}, {arguments.device}"
            report(name, logits_of(llm, texts)[counted], right)
    if arguments.llama:
        report("llama.cpp", llama_logits(arguments.llama, arguments.model, texts)[counted], right)


if __name__ == "__main__":
    main()
