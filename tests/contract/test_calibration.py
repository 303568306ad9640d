"""Measuring what runs take disturbs nobody, and works however short texts may be."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from weakref import ref

import pytest

from foredraft.batch import PackedBatch
from foredraft.cli.main import run
from foredraft.control.costs import Calibration
from foredraft.engine import calibration
from foredraft.engine.calibration import Calibrator, calibrate
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec
from foredraft.runtime.kv import KVCache
from foredraft.runtime.runner import ForwardOutput, Runner
from foredraft.types import Work
from tests.tiny_models import VOCAB, random_model, save_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was measured here before."""
    monkeypatch.setattr("foredraft.engine.loading.cache_folder", lambda: tmp_path / "models")
    return tmp_path


def calibrated(llm: LLM, max_model_len: int, file: Path) -> Calibration:
    calibrator = Calibrator(llm.engine.runner, llm.engine.scheduler.pool, max_model_len, "float32", file)
    found = calibrator.cached()
    while found is None:
        found = calibrator.step()
    return found


def decisions(llm: LLM, spec: str = "auto") -> dict[str, int]:
    """Of one request that is added to the engine itself."""
    llm.engine.add("0", [3, 1, 4], PARAMS, parse_spec(spec))
    outputs = []
    while llm.engine.has_work:
        outputs += [event.output for event in llm.engine.step() if event.output]
    return outputs[0].metrics.decisions


def test_a_finished_calibration_holds_no_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[ref[KVCache]] = []
    begin = KVCache.__init__

    def counted(self: KVCache, num_blocks: int, block_size: int) -> None:
        begin(self, num_blocks, block_size)
        caches.append(ref(self))

    llm = LLM(str(folder), spec="off")
    monkeypatch.setattr(KVCache, "__init__", counted)
    calibrator = Calibrator(llm.engine.runner, llm.engine.scheduler.pool, 64, "float32", tmp_path / "costs.json")
    while calibrator.step() is None:
        assert caches[0]() is not None
    gc.collect()
    assert caches[0]() is None


@pytest.mark.usefixtures("empty_cache")
def test_adding_a_request_measures_nothing(folder: Path) -> None:
    """Whoever adds to an engine waits for nothing: before the machine was measured, decoding is plain."""
    llm = LLM(str(folder), spec="off")
    assert not llm.engine.wants_calibration
    assert set(decisions(llm)) == {"measuring"}
    assert llm.engine.wants_calibration
    runs = 0
    while llm.engine.wants_calibration:
        llm.engine.calibrate_step()
        runs += 1
    assert runs > calibration.ROUNDS * len(calibration.ROWS), "each step is one run"
    assert set(decisions(llm)) != {"measuring"}
    assert LLM(str(folder), spec="off").engine.speculation.controller is not None, "it was kept on disk"


def test_runs_that_take_too_long_are_left_out(folder: Path, empty_cache: Path) -> None:
    """Between the requests of a server no run may take long. What is left out is measured at the next load."""
    llm = LLM(str(folder), spec="off", max_chunk_s=1e-9)
    decisions(llm)
    while llm.engine.wants_calibration:
        llm.engine.calibrate_step()
    controller = llm.engine.speculation.controller
    assert controller is not None
    assert controller.costs._measured.curve.rows == (1, 2, 3, 4, 6, 8, 12, 16)
    assert LLM(str(folder), spec="off").engine.speculation.controller is None
    assert (empty_cache / "exact.json").exists() and not (empty_cache / "costs.json").exists()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("first_run_s", [0.0, 5.0])
def test_no_run_takes_longer_than_a_request_may_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first_run_s: float
) -> None:
    """On a machine of 2 ms a row, which may compile for seconds when it first runs so many rows."""
    compiled: set[int] = set()
    runs: list[int] = []

    def two_ms_a_row(runner: Runner, kv: KVCache, works: list[Work]) -> float:
        rows = sum(work.num_rows for work in works)
        runs.append(rows)
        compiles_s = 0.0 if rows in compiled else first_run_s
        compiled.add(rows)
        return compiles_s + 0.002 * rows

    monkeypatch.setattr(calibration, "_time", two_ms_a_row)
    llm = LLM(str(folder), spec="off", max_chunk_s=0.05)
    decisions(llm)
    steps = 0
    while llm.engine.wants_calibration:
        llm.engine.calibrate_step()
        steps += 1
    assert steps >= len(runs), "a step makes one run at most"
    assert max(runs) < 25, "25 rows take 50 ms"
    controller = llm.engine.speculation.controller
    assert controller is not None
    curve = controller.costs._measured.curve
    assert curve.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert curve.seconds == tuple(0.002 * rows for rows in curve.rows)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("run_s", "most_runs"), [(0.2, 60), (3.0, 24)])
def test_little_is_measured_where_torch_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run_s: float, most_runs: int
) -> None:
    """There a run of a small model takes a good part of a second, or seconds."""
    runs: list[int] = []

    def slow(runner: Runner, kv: KVCache, works: list[Work]) -> float:
        runs.append(sum(work.num_rows for work in works))
        return run_s

    monkeypatch.setattr(calibration, "_time", slow)
    llm = LLM(str(folder), backend="torch")
    assert len(runs) <= most_runs and max(runs) <= 16
    assert llm.engine.speculation.controller is not None
    runs.clear()
    assert LLM(str(folder), backend="torch").engine.speculation.controller is not None
    assert not runs, "it was kept on disk"


def test_runs_are_timed_after_their_context_and_with_their_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, forward = LLM(str(folder)), Runner.forward
    timed: set[tuple[int, int, int]] = set()  # rows, logits, keys before the first row

    def recorded(self: Runner, batch: PackedBatch) -> ForwardOutput:
        timed.add((batch.num_rows, batch.num_logits, int(batch.tensors().prefix_lens[0]) - 1))
        return forward(self, batch)

    monkeypatch.setattr(Runner, "forward", recorded)
    measured = calibrate(llm.engine.runner, llm.engine.scheduler.pool, llm.max_model_len)
    assert {(rows, rows, measured.context) for rows in calibration.ROWS} <= timed


def test_rows_of_whole_batches_are_those_of_many_sequences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend has graphs of so many rows."""
    llm, forward = LLM(str(folder)), Runner.forward
    engine, sequences = llm.engine, dict[int, int]()

    def recorded(self: Runner, batch: PackedBatch) -> ForwardOutput:
        sequences[batch.num_rows] = len(batch.row_counts)
        return forward(self, batch)

    monkeypatch.setattr(Runner, "forward", recorded)
    monkeypatch.setattr(type(engine.runner.backend), "row_counts", (1, 2, 4, 8, 16, 32, 64, 128, 256))
    measured = calibrate(engine.runner, engine.scheduler.pool, llm.max_model_len)
    assert measured.curve.rows == (*calibration.ROWS, 128, 256)
    assert [sequences[rows] for rows in (1, 64, 128, 256)] == [1, 1, 8, 16]
    assert calibrate(engine.runner, engine.scheduler.pool, 64).curve.rows[-1] < 64, "of short texts there are none"


@pytest.mark.usefixtures("empty_cache")
def test_a_library_measures_when_it_loads_or_is_first_asked(folder: Path) -> None:
    assert LLM(str(folder), spec="auto(ngram)").engine.speculation.controller is not None
    llm = LLM(str(folder), spec="off", max_model_len=100)
    assert llm.engine.speculation.controller is None
    llm.generate([[5]], PARAMS, spec="ngram")
    assert llm.engine.speculation.controller is None
    llm.generate([[5]], PARAMS, spec="auto")
    assert llm.engine.speculation.controller is not None


@pytest.mark.usefixtures("empty_cache")
def test_a_full_pool_is_no_reason_to_refuse(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_tokens=64, max_num_seqs=2, spec="off")
    llm.engine.add("full", list(range(50)), PARAMS, parse_spec("off"))
    llm.engine.step()
    llm.engine.speculation.calibrate()
    assert llm.engine.speculation.controller is not None
    llm.engine.scheduler.check_integrity()


@pytest.mark.usefixtures("empty_cache")
def test_prefixes_stay_cached(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_tokens=512, spec="off")
    prompts = [[(7 * place + seed) % VOCAB for place in range(120)] for seed in range(4)]
    plain = llm.generate(prompts, PARAMS, spec="off")
    again = llm.generate(prompts, PARAMS, spec="auto")
    assert [output.metrics.cached_tokens for output in again] == [112] * 4
    assert [output.token_ids for output in again] == [output.token_ids for output in plain]


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 5, 8, 33])
@pytest.mark.usefixtures("empty_cache")
def test_the_shortest_contexts_can_be_measured(folder: Path, max_model_len: int) -> None:
    llm = LLM(str(folder), max_model_len=max_model_len)
    llm.generate([[5]], PARAMS, spec="auto")
    controller = llm.engine.speculation.controller
    assert controller is not None
    assert controller.costs.run(1, max_model_len) > 0


def test_a_curve_is_that_of_the_context_it_is_queried_for(folder: Path, tmp_path: Path) -> None:
    llm, file = LLM(str(folder)), tmp_path / "costs.json"
    short, long = calibrated(llm, 32, file), calibrated(llm, llm.max_model_len, file)
    assert (short.context, long.context) == (6, 149)
    assert len(short.curve.rows) < len(long.curve.rows) == len(calibration.ROWS)


def test_what_was_measured_is_not_measured_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, file = LLM(str(folder)), tmp_path / "costs.json"
    measured = calibrated(llm, 64, file)
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "_runs", lambda *arguments: pytest.fail("measured again"))
        assert calibrated(llm, 64, file) == measured
    assert calibrate(llm.engine.runner, llm.engine.scheduler.pool, 64).curve.rows == measured.curve.rows


def test_a_damaged_measurement_is_made_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, file = LLM(str(folder)), tmp_path / "costs.json"
    measured = calibrated(llm, 64, file)
    [(key, good)] = json.loads(file.read_text()).items()
    seconds, rows, nan = good["seconds"], good["rows"], float("nan")
    damaged: list[object] = [5, None, [], "x", {}, {**good, "context": 0}, {**good, "context": "7"}]
    damaged += [{name: good[name] for name in good if name != missing} for missing in good]
    for wrong in (nan, float("inf"), -1.0, 0, True, "1", None, 1e300):
        damaged.append({**good, "seconds": [wrong, *seconds[1:]]})
    damaged += [{**good, "seconds_per_key": wrong} for wrong in (nan, float("inf"), -1e-9, "0", None, [0.0])]
    damaged += [{**good, "seconds": wrong} for wrong in (5, seconds[1:], [*seconds, 1.0], [seconds], {"0": 1.0})]
    damaged += [{**good, "rows": wrong} for wrong in (5, rows[1:], [*rows, 999], rows[::-1], "1234", [rows])]

    def measured_again(*arguments: object) -> Iterator[Calibration | None]:
        yield None
        yield measured

    monkeypatch.setattr(calibration, "_runs", measured_again)
    for value in damaged:
        file.write_text(json.dumps({key: value}))
        assert calibrated(llm, 64, file) == measured
        assert json.loads(file.read_text()) == {key: good}, value


@pytest.mark.usefixtures("empty_cache")
def test_the_command_says_that_it_measures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remarks = []
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["foredraft", *f"generate hi --model {folder} --max-tokens 3 --json".split()])
        with pytest.raises(SystemExit, match="0"):
            run()
        remarks.append(capsys.readouterr().err.splitlines())
    assert [len(lines) for lines in remarks] == [1, 0]
    assert remarks[0][0].startswith("Measuring what runs of this model take on this machine")
