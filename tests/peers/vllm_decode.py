"""Runs in vLLM's environment: decodes the prompts of a task with one method, one prompt at a time, greedily.

    python vllm_decode.py TASK.json METHOD RESULT.json

TASK is what `tests/check_vllm.py` writes. RESULT gets the token ids of every answer, when its first and its last tokens
came, how many runs of the model gave tokens, and what vLLM counted of its drafts.
"""

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams, __version__

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def counted(llm: LLM) -> dict[str, int]:
    """What vLLM has counted since it started; nothing without speculation."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS.values()}
    return {name: values.get(metric, 0) for name, metric in COUNTERS.items()}


def decode(llm: LLM, name: str, prompt: list[int], params: SamplingParams) -> dict[str, object]:
    engine = llm.llm_engine
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    token_ids: list[int] = []
    times: list[float] = []  # of the runs that gave tokens
    while engine.has_unfinished_requests():
        for output in engine.step():
            if len(output.outputs[0].token_ids) > len(token_ids):
                token_ids = list(output.outputs[0].token_ids)
                times.append(time.perf_counter())
    return {"token_ids": token_ids, "runs": len(times), "decode_s": times[-1] - times[0]}


def main() -> None:
    task_file, method, result_file = sys.argv[1:]
    task = json.loads(Path(task_file).read_text())
    llm = LLM(
        task["model"],
        dtype=task["dtype"],
        max_model_len=task["max_model_len"],
        max_num_seqs=1,
        enforce_eager=task["enforce_eager"],
        speculative_config=task["methods"][method],
        disable_log_stats=False,  # without them it does not count drafts
    )
    params = SamplingParams(temperature=0, max_tokens=task["max_tokens"], stop_token_ids=task["stop"])
    decode(llm, "warm-up", task["warm_up"], params)
    before = counted(llm)
    answers = [decode(llm, str(index), prompt, params) for index, prompt in enumerate(task["prompts"])]
    counts = {name: value - before[name] for name, value in counted(llm).items()}
    Path(result_file).write_text(json.dumps({"version": __version__, "answers": answers, **counts}))


if __name__ == "__main__":
    main()
