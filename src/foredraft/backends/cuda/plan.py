"""The plan of one run on a GPU: what its kernels need to know of a batch, in one upload.

A batch of few rows is padded to a bucket of rows, keys and path lengths, whose plan has its own place in the memory of
the host and of the device: a graph that was captured with that plan can be replayed with the next batch of the bucket.
The upload is the first thing that a run does, so it is part of the graph. A batch with prompt chunks gets a plan of its
own size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.cuda.attention import Groups, rows_of_group, rows_together
from foredraft.backends.cuda.linear import SPLIT_ROWS
from foredraft.backends.layers import AttentionShape
from foredraft.batch import ForwardBatch, PackedBatch

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_PATH_BUCKETS = (16, 64)
_FEWEST_KEYS, _MORE_KEYS = 512, 4  # buckets of keys: the first, and by how much each is larger than the one before
_WHOLE_ROWS = 32  # so many rows of one sequence without paths go through their keys together
_PROMPT_ROWS = 128  # runs with more rows than this are not captured if prompts are among them
_LONG_PROMPT = 2 * SPLIT_ROWS  # rows of a run that needs every kernel which only prompts need
_NOWHERE = -1  # the slot of a padding row: nothing is stored


class Bucket(NamedTuple):
    """What plans that share one place in memory have in common, and so the graphs that are captured with them."""

    rows: int
    keys: int
    depth: int  # of the paths
    together: int  # the most rows of a group
    block_size: int  # that of a cache; runs of one backend may have several


@dataclass(frozen=True, eq=False)
class Plan(ForwardBatch):
    """A batch on the device, once it is uploaded. Each row attends with the rows of one of the two."""

    split: Groups | None
    whole: Groups | None
    bucket: Bucket | None  # None: used once, never captured
    staging: _Staging | None  # where the host has written it; None: it is written on the device

    @property
    def replayed_rows(self) -> int:
        return 0 if self.bucket is None else self.bucket.rows

    def upload(self) -> None:
        """Start to copy what the host has written. It may be written again once the device has been waited for."""
        if self.staging is not None:
            self.staging.upload()


class _Staging:
    """A buffer on the host and its copy on the device, and the arrays in both, one behind the other."""

    def __init__(
        self,
        rows: int,
        depth: int,  # of the paths
        tables: tuple[int, int],  # sequences, and the width of their block tables
        split: tuple[int, int],  # rows and groups
        whole: tuple[int, int],
        logits: int,
        device: torch.device,
    ) -> None:
        # Each row of these begins at a multiple of 16 bytes: kernels are compiled anew for pointers that do not.
        aligned = -(-rows // 4) * 4
        arrays: list[tuple[str, type[np.integer[Any]], tuple[int, ...]]] = [
            ("wide", np.int64, (3, aligned)),
            ("logit_rows", np.int64, (logits,)),
            ("narrow", np.int32, (3, aligned)),
            ("block_tables", np.int32, tables),
            ("paths", np.int32, (rows, depth)),
            ("split_rows", np.int32, (split[0],)),
            ("split_groups", np.int32, (split[1] + 1,)),
            ("whole_rows", np.int32, (whole[0],)),
            ("whole_groups", np.int32, (whole[1] + 1,)),
        ]
        lengths = [int(np.prod(shape)) * np.dtype(dtype).itemsize for _, dtype, shape in arrays]
        *starts, size = accumulate((-(-length // 16) * 16 for length in lengths), initial=0)
        pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host, self._device = pinned, torch.zeros(size, dtype=torch.uint8, device=device)
        self.rows = rows  # that may hold something; those behind read and write nothing
        self.arrays: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, dtype, shape), start, length in zip(arrays, starts, lengths, strict=True):
            self.arrays[name] = pinned.numpy()[start : start + length].view(dtype).reshape(shape)
            kind = torch.int64 if dtype is np.int64 else torch.int32
            self.tensors[name] = self._device[start : start + length].view(kind).view(shape)
        wide, narrow = (self.tensors[name][:, :rows] for name in ("wide", "narrow"))
        self.tensors.update(zip(("token_ids", "positions", "slots"), wide, strict=True))
        self.tensors.update(zip(("sequences", "prefix_lens", "path_lens"), narrow, strict=True))

    def upload(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


def wait(device: torch.device) -> None:
    """Until the device has done all that it was told, and so has read the last upload: only then may the host's buffer
    be written again. Mostly it has nothing to do by then: what it drew has been waited for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device.index).synchronize()  # by its index: a device is first looked up by name


class Plans:
    """The plans of one backend. Those of buckets are made once and filled again and again."""

    def __init__(self, device: torch.device, kv_dtype: torch.dtype) -> None:
        self._device = device
        self._kv_dtype = kv_dtype
        self._buckets: dict[Bucket, tuple[_Staging, Plan]] = {}

    def plan(self, batch: PackedBatch, shape: AttentionShape) -> Plan:
        has_prompt = batch.logit_rows is not None and max(batch.row_counts) >= _WHOLE_ROWS
        if batch.num_rows > (_PROMPT_ROWS if has_prompt else ROW_BUCKETS[-1]):
            return single_plan(batch, shape, self._device, self._kv_dtype)
        together = rows_together(shape, self._kv_dtype, whole=False)
        rows, depth = ROW_BUCKETS[bisect_left(ROW_BUCKETS, batch.num_rows)], batch.paths.shape[1]
        # A row of a tree sees few keys, but nodes lie one behind the other: their slots reach beyond the longest path.
        keys = _key_bucket(max(batch.max_keys, batch.reach))
        depth = next((size for size in _PATH_BUCKETS if size >= depth), depth)
        staging, plan = self._bucket(Bucket(rows, keys, depth, together, batch.block_size))
        wait(self._device)
        _fill(staging, batch)
        together = rows_of_group(batch.num_rows, together, has_paths=batch.paths.shape[1] > 0)
        _fill_groups(staging.arrays["split_groups"], batch.borders, together)
        return plan

    def empty(self, shape: AttentionShape, block_size: int, max_keys: int) -> Iterator[Plan]:
        """The plans of all buckets of rows up to a number of keys, and of a prompt, with rows that read and write
        nothing."""
        yield single_plan(_nothing(_LONG_PROMPT, block_size), shape, self._device, self._kv_dtype)
        together = rows_together(shape, self._kv_dtype, whole=False)
        for rows in reversed(ROW_BUCKETS):  # the memory of a large run serves the smaller ones too
            keys = 0
            while keys < max_keys:
                keys = _key_bucket(keys + 1)
                staging, plan = self._bucket(Bucket(rows, keys, _PATH_BUCKETS[0], together, block_size))
                wait(self._device)
                _fill_up(staging, 0)
                staging.arrays["split_groups"][:] = 0
                yield plan

    def _bucket(self, bucket: Bucket) -> tuple[_Staging, Plan]:
        if bucket not in self._buckets:
            rows, keys, depth, _, block_size = bucket
            width = -(-keys // block_size)
            staging = _Staging(rows, depth, (rows, width), (rows, rows), (0, 0), 0, self._device)
            staging.arrays["split_rows"][:] = np.arange(rows)
            plan = _plan(staging, block_size, keys, has_logit_rows=False, bucket=bucket)
            self._buckets[bucket] = staging, plan
        return self._buckets[bucket]


def single_plan(
    batch: PackedBatch, shape: AttentionShape, device: torch.device, kv_dtype: torch.dtype = torch.bfloat16
) -> Plan:
    """A plan of the batch's own size, which no graph is captured with."""
    runs = [range(start, stop) for start, stop in pairwise(batch.borders)]
    path_lens = batch.narrow[2]
    whole = [run for run in runs if len(run) >= _WHOLE_ROWS and not path_lens[run.start : run.stop].any()]
    split = [run for run in runs if run not in whole]
    of_split, of_whole = (rows_together(shape, kv_dtype, whole) for whole in (False, True))
    sequences, width = batch.block_tables.shape
    staging = _Staging(
        batch.num_rows,
        max(1, batch.paths.shape[1]),
        (sequences, width),
        (sum(map(len, split)), _num_groups(split, of_split)),
        (sum(map(len, whole)), _num_groups(whole, of_whole)),
        0 if batch.logit_rows is None else len(batch.logit_rows),
        device,
    )
    _fill(staging, batch)
    for view, view_runs, together in (("split", split, of_split), ("whole", whole, of_whole)):
        staging.arrays[f"{view}_rows"][:] = [row for run in view_runs for row in run]
        _fill_groups(staging.arrays[f"{view}_groups"], [0, *accumulate(map(len, view_runs))], together)
    if batch.logit_rows is not None:
        staging.arrays["logit_rows"][:] = batch.logit_rows
    return _plan(staging, batch.block_size, batch.max_keys, batch.logit_rows is not None)


def _key_bucket(reach: int) -> int:
    keys = _FEWEST_KEYS
    while keys < reach:
        keys *= _MORE_KEYS
    return keys


def _num_groups(runs: list[range], together: int) -> int:
    return sum(-(-len(run) // together) for run in runs)


def _fill(staging: _Staging, batch: PackedBatch) -> None:
    """Write the batch, and behind it rows that read and write nothing."""
    rows, depth, (sequences, width) = batch.num_rows, batch.paths.shape[1], batch.block_tables.shape
    arrays = staging.arrays
    _fill_up(staging, rows)
    arrays["wide"][:, :rows] = batch.wide
    arrays["narrow"][:, :rows] = batch.narrow
    width = min(width, arrays["block_tables"].shape[1])
    arrays["block_tables"][:sequences, :width] = batch.block_tables[:, :width]
    if depth:
        arrays["paths"][:rows, :depth] = batch.paths


def _nothing(rows: int, block_size: int) -> PackedBatch:
    """A prompt of one sequence, whose rows read and write nothing."""
    wide, narrow = np.zeros((3, rows), np.int64), np.zeros((3, rows), np.int32)
    wide[2] = _NOWHERE
    tables, paths = np.zeros((1, 1), np.int32), np.zeros((rows, 0), np.int32)
    return PackedBatch(wide, narrow, tables, paths, [rows], [rows - 1], block_size, max_keys=1, reach=1)


def _fill_up(staging: _Staging, rows: int) -> None:
    """Make all rows behind the first ones such that they read and write nothing."""
    if rows < staging.rows:
        wide, narrow = staging.arrays["wide"], staging.arrays["narrow"]
        wide[:2, rows : staging.rows] = narrow[:, rows : staging.rows] = 0
        wide[2, rows : staging.rows] = _NOWHERE
    staging.rows = rows


def _fill_groups(groups: NDArray[Any], borders: list[int], together: int) -> None:
    """Write the bounds of groups: runs between borders, cut where they are longer than `together`. Groups behind the
    last one are empty."""
    bounds = [place for start, stop in pairwise(borders) for place in range(start, stop, together)]
    groups[: len(bounds)] = bounds
    groups[len(bounds) :] = borders[-1]


def _plan(
    staging: _Staging, block_size: int, max_keys: int, has_logit_rows: bool, bucket: Bucket | None = None
) -> Plan:
    tensors = staging.tensors

    def groups(name: str) -> Groups | None:
        rows = tensors[f"{name}_rows"]
        return Groups(rows, tensors[f"{name}_groups"]) if len(rows) else None

    of_rows = ("token_ids", "positions", "slots", "sequences", "prefix_lens", "paths", "path_lens")
    return Plan(
        **{name: tensors[name] for name in of_rows},
        block_tables=tensors["block_tables"],
        logit_rows=tensors["logit_rows"] if has_logit_rows else None,
        block_size=block_size,
        max_keys=max_keys,
        split=groups("split"),
        whole=groups("whole"),
        bucket=bucket,
        staging=staging,
    )
