"""`foredraft models`: the catalogue, and what is known of one model. No model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from foredraft.models.catalog import open_checkpoint
from foredraft.models.known_models import MODELS
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model
from tests.unit.cli_command import Command, cli_command, fails_with_one_sentence


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return cli_command(monkeypatch, capsys)


class TestModels:
    @pytest.fixture(autouse=True)
    def empty_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place: None)

    @pytest.fixture
    def small_machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A container that has 4 GB of memory."""
        limit = tmp_path / "memory.max"
        limit.write_text("4000000000\n")
        monkeypatch.setattr("foredraft.reports.facts._CONTAINER_LIMIT", limit)

    @pytest.mark.usefixtures("small_machine")
    @pytest.mark.parametrize("arguments", [["models"], ["models", "list"]])
    def test_list(self, command: Command, arguments: list[str]) -> None:
        lines = {line.split()[0]: line.split()[1:] for line in command(*arguments).out.splitlines()}
        assert len(lines) == len(MODELS)
        assert lines["smollm2-135m"] == ["98", "MB", "Apache-2.0", "head", "fits,", "not", "fetched"]
        told = "5.03 GB Apache-2.0 needs about 7.94 GB of memory, and this machine has 4.00 GB"
        assert lines["qwen3-8b"] == told.split()

    @pytest.mark.usefixtures("small_machine")
    def test_list_in_json(self, command: Command) -> None:
        records = {record["name"]: record for record in command("models", "--json").records}
        assert records["smollm2-1.7b"]["fits"] and not records["llama-3.1-8b"]["fits"]
        assert records["llama-3.1-8b"]["known_heads"] == ["RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"]
        assert records["qwen2.5-coder-1.5b"]["draft_model"] == "qwen2.5-coder-0.5b"

    def test_info_of_a_file_of_the_hub(self, command: Command) -> None:
        text = command("models", "info", "qwen3:4b").out
        assert "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf" in text and "z-lab/Qwen3-4B-DFlash-b16" in text

    def test_info_names_heads_that_come_with_foredraft_before_the_model_is_fetched(self, command: Command) -> None:
        assert "\nshipped heads eagle\n" in command("models", "info", "qwen2.5-coder-1.5b").out
        assert "\nshipped heads none\n" in command("models", "info", "qwen3:4b").out

    @pytest.mark.usefixtures("small_machine")
    @pytest.mark.parametrize(
        ("on_the_gpu", "told"), [(24e9, ", and fits its GPU"), (1e9, ", and more than its GPU has"), (None, "")]
    )
    def test_info_says_whether_a_model_fits_the_gpu(
        self, command: Command, monkeypatch: pytest.MonkeyPatch, on_the_gpu: float | None, told: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_the_gpu is not None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, on_the_gpu))
        text = command("models", "info", "qwen3-8b").out
        assert f"memory        about 7.94 GB: more than this machine has{told}\n" in text

    @pytest.mark.parametrize("arguments", [["smollm2"], ["--model", "smollm2-135m"]])
    def test_info_in_json(self, command: Command, arguments: list[str]) -> None:
        (record,) = command("models", "info", *arguments, "--json").records
        assert set(record) == {
            "name",
            "size_bytes",
            "licence",
            "path",
            "original",
            "file",
            "shipped_heads",
            "known_heads",
            "draft_model",
            "memory_bytes",
            "fits",
            "fits_gpu",
            "proposers",
            "dtype",
            "backend",
            "note",
            "kv_cache",
            "heads",
            "config",
        }
        assert record["name"] == "smollm2-135m"
        assert record["path"] is None

    @pytest.mark.parametrize(
        ("name", "kv", "text"),
        [
            ("llama", (3 * 256, 0, 0), "768 bytes per token"),
            ("gpt-oss", (2 * 256, 24, 2 * 256 * 24), "512 bytes per token, and 12,288 per sequence for windows of 24 "),
            ("mistral-sliding", (0, 50, 3 * 256 * 50), "0 bytes per token, and 38,400 per sequence for windows of 50 "),
        ],
    )
    def test_info_tells_what_tokens_take_of_the_cache(
        self, command: Command, tmp_path: Path, name: str, kv: tuple[int, int, int], text: str
    ) -> None:
        """A layer has two heads of 16 numbers in float32, for K and for V."""
        folder = str(save_model(random_model(name), tmp_path))
        (record,) = command("models", "info", folder, "--json").records
        assert tuple(record["kv_cache"].values()) == kv
        assert f"kv cache      {text}" in command("models", "info", folder).out

    def test_info_lists_heads_with_what_was_measured(
        self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from foredraft.heads import catalog

        folder, shipped = save_model(random_model("llama"), tmp_path / "model"), tmp_path / "shipped"
        assert command("models", "info", str(folder), "--json").records[0]["heads"] == []
        for kind, rates in (("eagle", (0.66, 0.7)), ("medusa", ())):
            save_head(random_head(tiny_config(kind, folder, acceptance=rates)), shipped / "tiny" / kind, torch.bfloat16)
        monkeypatch.setattr(catalog, "SHIPPED", shipped)
        heads = catalog.shipped_heads(open_checkpoint(folder), shipped)
        monkeypatch.setattr(catalog, "shipped_heads", lambda checkpoint: heads)
        eagle, medusa = command("models", "info", str(folder), "--json").records[0]["heads"]
        assert eagle == {
            "kind": "eagle",
            "layout": "Foredraft",
            "comes_with": "Foredraft",
            "path": str(shipped / "tiny" / "eagle"),
            "size_bytes": (shipped / "tiny" / "eagle" / "model.safetensors").stat().st_size,
            "bits": pytest.approx(16, abs=1),  # with the names and shapes of its tensors
            "acceptance": [0.66, 0.7],
        }
        assert medusa["acceptance"] == []
        text = command("models", "info", str(folder)).out
        lines = [line.split(maxsplit=1) for line in text.splitlines()]
        (eagle,), (medusa,) = (
            [what for name, *rest in lines for what in rest if name == kind] for kind in ("eagle", "medusa")
        )
        assert eagle.startswith("Foredraft layout, comes with Foredraft, ")
        assert eagle.endswith(" bits, accepted by depth: 0.66, 0.70") and medusa.endswith(" bits, not measured")
        assert command("models", "info", str(folder), "--head", "none", "--json").records[0]["heads"] == []

    @pytest.mark.parametrize(
        ("name", "layout"),
        [
            ("eagle3/eagle", "EAGLE-3"),
            ("eagle3/peagle", "P-EAGLE, speculators"),
            ("eagle1/eagle1", "EAGLE"),
            ("dflash/deepspec-dspark", "DSpark"),
            ("medusa/new", "Medusa"),
            ("gguf/eagle3", "EAGLE-3, GGUF"),
        ],
    )
    def test_info_tells_about_a_head_that_is_given(
        self, command: Command, tmp_path: Path, name: str, layout: str
    ) -> None:
        """With what was measured of it and kept, until its file changes."""
        from foredraft.engine.kept_acceptance import keep_acceptance
        from foredraft.heads.catalog import find_heads

        model = random_model("llama", num_hidden_layers=8)
        folder, place = save_model(model, tmp_path / "model"), tmp_path / "head"
        LAYOUTS[name].write(place, TargetShape(hidden=model.config.hidden_size, vocab=VOCAB), 7)
        given = next(place.glob("*.gguf"), place)
        arguments = ("models", "info", str(folder), "--head", str(given), "--json")
        (head,) = command(*arguments).records[0]["heads"]
        assert (head["layout"], head["comes_with"], head["acceptance"]) == (layout, "--head", [])
        assert 15 < head["bits"] < 40 and head["size_bytes"] > 10_000
        heads = find_heads(str(given), open_checkpoint(folder))
        keep_acceptance(heads, head["kind"], (0.5, 0.25))
        assert command(*arguments).records[0]["heads"][0]["acceptance"] == [0.5, 0.25]
        file = given if given.is_file() else next(place.glob("*.safetensors"))
        os.utime(file, (1, 1))
        assert command(*arguments).records[0]["heads"][0]["acceptance"] == []

    @pytest.mark.parametrize("is_built", [True, False])
    def test_info_says_where_slow_kernels_serve(
        self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_built: bool
    ) -> None:
        from foredraft.backends import choose

        if is_built and not choose.native_is_built():
            pytest.skip("the kernels were not built here")
        monkeypatch.setattr(choose, "native_is_built", lambda: is_built)
        monkeypatch.setattr(choose.torch.cuda, "is_available", lambda: False)
        folder = str(save_model(random_model("llama"), tmp_path / "model"))
        (record,) = command("models", "info", folder, "--json").records
        assert (record["backend"], record["note"] is None) == (("native", True) if is_built else ("torch", False))
        assert ("install a C compiler" in command("models", "info", folder).out) != is_built

    def test_missing_kernels_are_told_with_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        import torch

        from foredraft.backends import choose

        monkeypatch.setattr(choose, "native_is_built", lambda: False)
        assert choose.choose_backend("auto", "int4", torch.device("cpu"), 1).name == "torch"
        (told,) = caplog.messages
        assert told.startswith("The fast kernels are missing on this machine, so torch's serve: many times slower")
        assert "apt install gcc" in told and told.endswith("-m foredraft.kernels.build")
        monkeypatch.setattr(choose, "levels", tuple)
        choose.choose_backend("auto", "int4", torch.device("cpu"), 1)
        assert "gcc" not in caplog.messages[1] and "There are none for" in caplog.messages[1]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["info"], "Say which model: foredraft models info NAME; foredraft models lists the catalogue."),
            (["fetch"], "Say which model"),
            (["info", "smollm3-135"], "smollm2-135m"),
            (["burn"], "burn"),
        ],
    )
    def test_bad_arguments(self, command: Command, arguments: list[str], sentence: str) -> None:
        result = command("models", *arguments)
        assert fails_with_one_sentence(result), result
        assert sentence in result.err
