"""Our proposers in real vLLM: plain, its own n-gram, our suffix proposer and our exported EAGLE-3 head, beside
Foredraft itself.

    python -m tests.check_vllm [--suite FILE.jsonl|builtin] [--prompts 20] [--max-tokens 64] [--k 5] [--only PART]...

Both engines have the same model in float32, the same prompts as token ids, one at a time, greedily. vLLM runs in an
environment of its own, .peers/vllm, which `make check-vllm` makes: one process for each method. The model, the exported
head and the results lie in build/check-vllm; `--only` renews some of them and compares with the others as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import load_suite
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.models.catalog import DEFAULT_MODEL, open_checkpoint, resolve
from foredraft.models.checkpoint import Checkpoint

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".peers" / "vllm" / "bin" / "python"
DECODE = ROOT / "tests" / "peers" / "vllm_decode.py"
HEADS = ROOT / "src/foredraft/heads/shipped" / DEFAULT_MODEL
FOLDER = ROOT / "build" / "check-vllm"
SUITE = ROOT.parent / "shared" / "data" / "spec_bench_dev.jsonl"  # lies beside the repository where there is one
DTYPE = "float32"
MAX_MODEL_LEN = 4096
KV_CACHE_GIB = 2
WARM_UP = "Count from one to twenty."
MOST_SUFFIX_GAP = 0.05
MOST_EAGLE_GAP = 0.1
TIE = 0.01  # log probabilities that differ by less are a tie: sums of float32 in another order decide it


@dataclass(frozen=True)
class Task:
    """What every process of vLLM reads."""

    model: str
    dtype: str
    max_model_len: int
    enforce_eager: bool
    prompts: list[list[int]]
    warm_up: list[int]
    stop: list[int]
    max_tokens: int
    k: int
    methods: dict[str, dict[str, Any] | None]  # name -> speculative_config

    @classmethod
    def read(cls) -> Task:
        return cls(**json.loads((FOLDER / "task.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Result:
    """All answers of one method. Drafts are runs that had draft tokens to verify."""

    name: str
    texts: list[list[int]]
    runs: int  # that gave tokens
    decode_s: float  # from the first token of every answer to its last
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a run that had a draft, as vLLM defines it."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_run(self) -> float:
        return self.tokens / self.runs

    @property
    def inter_token_latency_s(self) -> float:
        return self.decode_s / (self.tokens - len(self.texts))

    def figures(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "tokens_per_run": round(self.tokens_per_run, 4),
            "inter_token_latency_ms": round(1000 * self.inter_token_latency_s, 2),
            "drafts": self.drafts,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "tokens": self.tokens,
        }


def methods(k: int) -> dict[str, dict[str, Any] | None]:
    """What vLLM is told, by the name of a row."""
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "ngram-default": {"method": "ngram", "num_speculative_tokens": k},
        "suffix": {
            "method": "custom_class",
            "model": "foredraft.integrations.vllm.SuffixProposer",
            "num_speculative_tokens": k,
        },
        "eagle": {"method": "eagle3", "model": str(FOLDER / "eagle"), "num_speculative_tokens": k},
    }


def offline_specs(k: int) -> dict[str, str]:
    """The same in Foredraft, by the name of a row."""
    return {
        "plain": "off",
        "ngram": f"ngram:k={k}",
        "suffix": f"suffix:k={k},tree=chain,min_n=1,min_score=0.39,store_doubt=2",
        "eagle": f"eagle:tree=chain,k={k}",
    }


def write_model(checkpoint: Checkpoint, folder: Path) -> None:
    """The default model's weights as transformers would save them, in float32: nothing is rounded."""
    from safetensors.torch import save_file

    config = checkpoint.config
    folder.mkdir(parents=True)
    tensors = {
        name: (checkpoint.vector(name) if name.endswith("norm.weight") else checkpoint.weight(name).dense()).float()
        for name in checkpoint.names()
    }
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": DTYPE,
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    checkpoint.tokenizer().save(folder)


def prepare(arguments: argparse.Namespace) -> None:
    """The model, the exported head and the task."""
    questions = load_suite(str(arguments.suite), arguments.prompts)
    if len(questions) < arguments.prompts:
        raise SystemExit(
            f"{arguments.suite} has {len(questions)} questions; --prompts {arguments.prompts} is too many."
        )
    shutil.rmtree(FOLDER, ignore_errors=True)
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL))
    write_model(checkpoint, FOLDER / "model")
    export(HEADS / "eagle", Engine.vllm, FOLDER / "eagle", checkpoint, str(FOLDER / "model"))
    tokenizer = checkpoint.tokenizer()
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in [q.text for q in questions]]
    longest = max(map(len, prompts)) + arguments.max_tokens
    if longest > MAX_MODEL_LEN:
        raise SystemExit(f"A prompt and its answer may have {longest} tokens; this check has room for {MAX_MODEL_LEN}.")
    task = Task(
        model=str(FOLDER / "model"),
        dtype=DTYPE,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=not arguments.compile,
        prompts=prompts,
        warm_up=tokenizer.encode_chat([{"role": "user", "content": WARM_UP}]),
        stop=list(tokenizer.eos_token_ids),
        max_tokens=arguments.max_tokens,
        k=arguments.k,
        methods=methods(arguments.k),
    )
    (FOLDER / "task.json").write_text(json.dumps(asdict(task)) + "\n", encoding="utf-8")


def decode_in_vllm(method: str) -> None:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {
        "PYTHONPATH": str(ROOT / "src"),  # where vLLM finds our class
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that nothing but the engine is measured
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = FOLDER / f"vllm-{method}.log"
    with log.open("w", encoding="utf-8") as output:
        command = [PYTHON, DECODE, FOLDER / "task.json", method, FOLDER / f"vllm-{method}.json"]
        status = subprocess.run(command, stdout=output, stderr=output, env={**os.environ, **settings}).returncode
    if status:
        raise SystemExit(f"vLLM ended with status {status} at {method}; the end of {log}:\n{log.read_text()[-2000:]}")


def vllm_result(method: str) -> Result:
    found = json.loads((FOLDER / f"vllm-{method}.json").read_text(encoding="utf-8"))
    answers = found["answers"]
    return Result(
        f"vLLM, {method}",
        [answer["token_ids"] for answer in answers],
        sum(answer["runs"] for answer in answers),
        sum(answer["decode_s"] for answer in answers),
        *(found[name] for name in ("drafts", "drafted", "accepted")),
    )


def decode_offline(task: Task, method: str) -> None:
    """As vLLM does it: a new engine, the same warm-up, then one prompt after the other."""
    spec = offline_specs(task.k)[method]
    llm = LLM(DEFAULT_MODEL, dtype=DTYPE, head=str(HEADS), spec="off", max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    params = SamplingParams(temperature=0, max_tokens=task.max_tokens)
    llm.generate(task.warm_up, params, spec=spec)
    outputs = [llm.generate(prompt, params, spec=spec)[0] for prompt in task.prompts]
    metrics = [output.metrics for output in outputs]
    result = Result(
        f"Foredraft, {spec}",
        [list(output.token_ids) for output in outputs],
        sum(each.target_runs for each in metrics),
        sum(each.inter_token_latency_s * (each.emitted_tokens - 1) for each in metrics),
        sum(each.drafts for each in metrics),
        sum(each.drafted_tokens for each in metrics),
        sum(each.accepted_tokens for each in metrics),
    )
    (FOLDER / f"foredraft-{method}.json").write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")


def offline_result(method: str) -> Result:
    return Result(**json.loads((FOLDER / f"foredraft-{method}.json").read_text(encoding="utf-8")))


def gaps(task: Task, plain: Result, others: list[Result]) -> dict[str, list[float]]:
    """Where an answer leaves the plain one: by how much the log probabilities of the two tokens differ there."""
    llm: LLM | None = None
    found: dict[str, list[float]] = {}
    for other in others:
        found[other.name] = []
        for prompt, expected, text in zip(task.prompts, plain.texts, other.texts, strict=True):
            if text == expected:
                continue
            place = next((i for i, (a, b) in enumerate(zip(expected, text)) if a != b), None)
            if place is None:  # one ends where the other goes on
                found[other.name].append(float("inf"))
                continue
            llm = llm or LLM(DEFAULT_MODEL, dtype=DTYPE, head=None, spec="off", max_num_seqs=1)
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
            (output,) = llm.generate(prompt + expected[:place], params)
            assert output.logprobs is not None
            top = dict(output.logprobs[0].top)
            pair = [top.get(token, float("-inf")) for token in (expected[place], text[place])]
            found[other.name].append(abs(pair[0] - pair[1]))
    return found


def within(figure: float, reference: float, most: float) -> bool:
    return abs(figure / reference - 1) <= most


def compare(task: Task) -> dict[str, Any]:
    theirs = {method: vllm_result(method) for method in task.methods}
    ours = {method: offline_result(method) for method in offline_specs(task.k)}
    plain = theirs["plain"]
    drafted = [result for method, result in theirs.items() if method != "plain"]
    leaves = gaps(task, plain, drafted)
    suffix, eagle = theirs["suffix"], theirs["eagle"]
    checks = {
        "the suffix proposer in vLLM has our acceptance rate, within 5 %": within(
            suffix.acceptance_rate, ours["suffix"].acceptance_rate, MOST_SUFFIX_GAP
        ),
        "the suffix proposer in vLLM has our mean acceptance length, within 5 %": within(
            suffix.mean_acceptance_length, ours["suffix"].mean_acceptance_length, MOST_SUFFIX_GAP
        ),
        "its acceptance rate is greater than that of vLLM's n-gram of short suffixes": (
            suffix.acceptance_rate > theirs["ngram"].acceptance_rate
        ),
        "it gives more tokens per run than vLLM's n-gram, of short suffixes and as it is by default": (
            suffix.tokens_per_run > max(theirs["ngram"].tokens_per_run, theirs["ngram-default"].tokens_per_run)
        ),
        "the EAGLE-3 head in vLLM has our mean acceptance length, within 10 %": within(
            eagle.mean_acceptance_length, ours["eagle"].mean_acceptance_length, MOST_EAGLE_GAP
        ),
        "where a text is not vLLM's plain text, it leaves it at a tie": all(
            gap < TIE for each in leaves.values() for gap in each
        ),
    }
    rows = []
    for result in (*theirs.values(), *ours.values()):
        same = sum(text == expected for text, expected in zip(result.texts, plain.texts, strict=True))
        rows.append({**result.figures(), "plain_text": same, "prompts": len(plain.texts)})
    return {"k": task.k, "max_tokens": task.max_tokens, "rows": rows, "gaps": leaves, "checks": checks}


def show(report: dict[str, Any]) -> None:
    print(f"K = {report['k']}, {report['max_tokens']} tokens at most, greedy, one prompt at a time, {DTYPE}\n")
    print(f"{'':48} {'length':>7} {'rate':>6} {'per run':>8} {'between tokens':>15} {'as plain vLLM':>14}")
    for row in report["rows"]:
        length, rate = (f"{row[key]:.2f}" for key in ("mean_acceptance_length", "acceptance_rate"))
        length, rate = (length, rate) if row["drafts"] else ("", "")
        latency, same = f"{row['inter_token_latency_ms']:.1f} ms", f"{row['plain_text']} of {row['prompts']}"
        print(f"{row['name']:48} {length:>7} {rate:>6} {row['tokens_per_run']:8.2f} {latency:>15} {same:>14}")
    print("\nlength: tokens of a run that had a draft (mean acceptance length); rate: accepted draft tokens of all")
    for name, each in report["gaps"].items():
        if each:
            print(f"{name}: leaves the plain text in {len(each)}, at gaps of {', '.join(f'{gap:.1e}' for gap in each)}")
    print()
    for sentence, holds in report["checks"].items():
        print(f"{'true ' if holds else 'FALSE'}  {sentence}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["files", *(f"vllm-{name}" for name in methods(1)), *(f"foredraft-{name}" for name in offline_specs(1))]
    parser.add_argument("--suite", default=SUITE, help="questions in Spec-Bench's format, or builtin")
    parser.add_argument("--prompts", type=int, default=20, help="how many, evenly over the kinds of the suite")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=5, help="draft tokens of all methods")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model first, for every method")
    parser.add_argument("--only", action="append", choices=[*parts, "compare"], help="a part; all when not given")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    chosen = arguments.only or [*parts, "compare"]
    if not PYTHON.exists():
        raise SystemExit(f"vLLM is not in {PYTHON.parents[1]}; `make check-vllm` installs it there.")
    if "files" in chosen and str(arguments.suite) != "builtin" and not Path(arguments.suite).exists():
        raise SystemExit(
            f"{arguments.suite} is not there; give a file of questions in Spec-Bench's format with --suite, or "
            "--suite builtin for the prompts that come with Foredraft."
        )
    for part in chosen:
        print(f"[{part}]", file=sys.stderr, flush=True)
        kind, _, method = part.partition("-")
        if part == "files":
            prepare(arguments)
        elif kind == "vllm":
            decode_in_vllm(method)
        elif kind == "foredraft":
            decode_offline(Task.read(), method)
    if "compare" not in chosen:
        return 0
    report = compare(Task.read())
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
