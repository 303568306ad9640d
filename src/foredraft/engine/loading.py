"""From a model's name to an engine that can run it: the one place where all parts are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from foredraft.backends.base import Backend
from foredraft.backends.choose import choose_backend, choose_device
from foredraft.config import EngineConfig, ModelConfig
from foredraft.engine.best_head import HeadTimer, best_head
from foredraft.engine.blocks import BlockPool
from foredraft.engine.calibration import Calibrator
from foredraft.engine.capacity import capacity_of, check_length, token_bytes
from foredraft.engine.chunks import ChunkLimit
from foredraft.engine.engine import Engine
from foredraft.engine.exactness import ensure_exact
from foredraft.engine.head_fit import HeadFit
from foredraft.engine.kept_acceptance import keep_acceptance, with_kept_acceptance
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.speculation import Speculation
from foredraft.engine.window_blocks import WindowBlocks
from foredraft.errors import InvalidModel
from foredraft.heads.catalog import find_heads
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.decoder import Decoder, load_decoder
from foredraft.models.sources import cache_folder
from foredraft.models.tokenizer import Tokenizer
from foredraft.proposers.model.shared_models import SharedModels
from foredraft.proposers.registry import Spec, build_proposer
from foredraft.proposers.target import TargetModel
from foredraft.runtime.kv import TARGET_GROUP, KVCache
from foredraft.runtime.runner import Runner
from foredraft.sampling.grammar import Grammars

# stage, done, total: "fetch" counts bytes, "load" tensors; "check" and "measure" have a total of 0, which is unknown
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LoadedModel:
    """An engine and what its users want to know of it."""

    engine: Engine
    tokenizer: Tokenizer
    config: ModelConfig
    backend: Backend
    dtype: str
    max_model_len: int
    exact_report: str


def load_model(model: str, options: EngineConfig, spec: Spec, progress: Progress | None = None) -> LoadedModel:
    """Fetch, open, pack and prove a model; raises ForedraftError with a sentence for whatever is wrong. The machine is
    measured here if `spec`, the default of requests, is adaptive."""

    def report(stage: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(stage, done, total)

    device = choose_device(options.device)
    checkpoint = open_checkpoint(resolve(model, report("fetch")))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    dtype = checkpoint.precision if options.dtype == "auto" else options.dtype
    backend = choose_backend(options.backend, dtype, device, options.threads, options.activations)
    heads = with_kept_acceptance(find_heads(options.head, checkpoint, report("fetch")))
    tapped = tuple(sorted({tap for head in heads.values() for tap in head.config.taps}))
    check_length(options, config)
    # Without rotations: a file may claim any length, and what memory allows of it is known when the weights are in.
    decoder = _load_weights(checkpoint, model, dtype, backend, report("load"))
    capacity = capacity_of(options, config, token_bytes(config, backend, len(tapped)), backend.device)
    max_model_len = capacity.max_model_len
    decoder = decoder.with_positions(max_model_len)
    if progress is not None:
        progress("check", 0, 0)
    if options.exact:
        exact_report = str(ensure_exact(backend, decoder, dtype, cache_folder().parent / "exact.json"))
    else:
        exact_report = "exact=False: a text may differ between running alone and in a batch"

    kv = KVCache(capacity.num_blocks, options.block_size, capacity.num_window_blocks)
    windows = None
    if kv.num_window_blocks:
        windows = WindowBlocks(max(config.windows), options.block_size, kv.num_window_blocks, kv.window_blocks)
    pool = BlockPool(kv.num_blocks, options.block_size, options.prefix_salt, options.prefix_caching, windows)
    # Heads are loaded with the model and not later, so every block that was ever computed has its taps.
    layers = kv.add_group(TARGET_GROUP, config, backend)
    taps = kv.add_taps(tapped, config.hidden_size, backend) if tapped else None
    runner = Runner(decoder, backend, layers, taps)
    runner.warm(options.block_size, max_model_len)
    kv.warm()
    target = TargetModel(
        *(checkpoint, tokenizer, runner, kv, max_model_len, options.max_num_seqs, dtype, options.threads),
        *(SharedModels(kv), heads),
    )
    make_proposer = partial(build_proposer, target=target)
    costs_file = cache_folder().parent / "costs.json"
    time_head = HeadTimer(make_proposer, runner, pool, max_model_len, dtype, costs_file)
    eos_token_ids = frozenset((*config.eos_token_ids, *tokenizer.eos_token_ids))
    engine = Engine(
        config=config,
        max_model_len=max_model_len,
        runner=runner,
        scheduler=Scheduler(pool, options.max_num_seqs, options.rows_per_step, options.refill),
        kv=kv,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        generation_defaults=checkpoint.generation,
        speculation=Speculation(
            make_proposer=make_proposer,
            calibrator=Calibrator(runner, pool, max_model_len, dtype, costs_file),
            vocab_size=config.vocab_size,
            choose_head=partial(best_head, heads, time_head),
            head_fit=HeadFit(partial(keep_acceptance, heads)),
        ),
        chunk_limit=ChunkLimit(options.max_chunk_s),
        grammars=Grammars(tokenizer.to_json, config.vocab_size, eos_token_ids),
    )
    if progress is not None:
        progress("measure", 0, 0)
    engine.speculation.calibrate(from_cache_only=not spec.adaptive)
    return LoadedModel(engine, tokenizer, config, backend, dtype, max_model_len, exact_report)


def _load_weights(
    checkpoint: Checkpoint, model: str, dtype: str, backend: Backend, report: Callable[[int, int], None] | None
) -> Decoder:
    try:
        return load_decoder(checkpoint, dtype, 0, backend, report)
    except torch.OutOfMemoryError as error:
        total = torch.cuda.mem_get_info(backend.device)[1] / 2**30
        raise InvalidModel(
            f"{model} with dtype={dtype} does not fit on {backend.device}, which has {total:.1f} GiB of memory; use a "
            "smaller dtype (int8 or int4), a smaller model, or device='cpu'."
        ) from error
