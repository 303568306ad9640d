"""Several engines that write text side by side. Python is what limits one engine on a GPU, so more processes write
more."""

from __future__ import annotations

import multiprocessing.dummy
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ForedraftError, InvalidModel
from foredraft.llm import LLM
from foredraft.train.shards import read_shard, shard_file, shard_files
from foredraft.train.text import TextPlan, TextWriter

Progress = Callable[[int, float], None]  # answer tokens so far, seconds so far
_EMPTY_CHUNKS = 3  # so many in a row: this model writes nothing that could be used


@dataclass(frozen=True)
class EngineOptions:
    """The target as each process loads it."""

    model: str
    name: str
    digest: str
    dtype: str
    device: str
    batch: int
    threads: int | None


@dataclass(frozen=True)
class _Task:
    """What a worker does: every chunk that is missing of those whose number leaves `worker` after division."""

    folder: Path
    plan: TextPlan
    options: EngineOptions
    worker: int
    workers: int
    deadline: float  # a time of time.monotonic, which all processes share


def write_text(
    folder: Path,
    plan: TextPlan,
    options: EngineOptions,
    tokens: int,
    workers: int = 1,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> int:
    """Continues the text of a folder until it has `tokens` answer tokens or `seconds` are over; returns how many it
    has."""
    started = time.monotonic()
    have = sum(read_shard(file)[1].num_answer_tokens for file in shard_files(folder))
    if have >= tokens:
        return have
    folder.mkdir(parents=True, exist_ok=True)
    # One worker is a thread: a process of its own would gain nothing.
    context: Any = multiprocessing.dummy if workers == 1 else multiprocessing.get_context("spawn")
    results, stop, loaded = context.Queue(), context.Event(), context.Event()
    running = []
    for worker in range(workers):
        task = _Task(folder, plan, options, worker, workers, inf if seconds is None else started + seconds)
        running.append(context.Process(target=_work, args=(task, results, stop, loaded)))
        running[-1].daemon = True
        running[-1].start()
    ended, failure = 0, None
    try:
        while ended < workers:
            try:
                result = results.get(timeout=1)
            except queue.Empty:
                if not any(each.is_alive() for each in running) and results.empty():
                    failure = failure or "a process that wrote text ended early"
                    break
                continue
            if isinstance(result, int):
                have += result
                if progress is not None:
                    progress(have, time.monotonic() - started)
            else:
                ended += 1
                failure = failure or result
            if have >= tokens or failure:
                stop.set()
    finally:
        stop.set()
        for each in running:
            each.join()
    if failure:
        raise InvalidModel(f"The training text could not be written: {failure}")
    return have


def _work(task: _Task, results: Any, stop: Any, loaded: Any) -> None:
    """Puts the answer tokens of each chunk, and at the end None or what went wrong."""
    try:
        _write_chunks(task, results, stop, loaded)
        results.put(None)
    except ForedraftError as error:
        results.put(str(error))
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")
        raise
    finally:
        loaded.set()


def _write_chunks(task: _Task, results: Any, stop: Any, loaded: Any) -> None:
    """The first worker loads the model alone: what it compiles for a GPU, the others then find."""
    if task.worker > 0:
        loaded.wait()
    options = task.options
    llm = LLM(
        options.model,
        spec="off",
        dtype=options.dtype,
        device=options.device,
        exact=False,
        max_num_seqs=options.batch,
        max_num_batched_tokens=max(2048, options.batch),
        refill=max(1, options.batch // 4),
        max_chunk_s=inf,
        kv_cache_tokens=options.batch * (task.plan.max_len // 2),
        prefix_caching=False,
        threads=options.threads,
    )
    if task.workers > 1 and options.device != "cpu":
        torch.set_num_threads(1)  # threads that wait for each other's cores cost more than they help
    loaded.set()
    writer = TextWriter(task.plan, llm, options.name, options.digest)
    chunk, empty = task.worker, 0

    def stopped() -> bool:
        return bool(stop.is_set()) or time.monotonic() > task.deadline

    while not stopped():
        if not shard_file(task.folder, chunk).exists():
            written = writer.write_chunk(task.folder, chunk, stopped)
            results.put(written)
            empty = 0 if written else empty + 1
            if empty == _EMPTY_CHUNKS and not stopped():
                raise InvalidModel(f"{options.name} writes nothing that could be trained on; give a file of prompts.")
        chunk += task.workers
    llm.close()
