"""The command line: what it prints where, and how it ends. The model is a stand-in."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

import foredraft
from foredraft.cli.options import ModelOptions
from foredraft.params import SamplingParams
from tests.unit.cli_command import Command, cli_command, fails_with_one_sentence
from tests.unit.fake_llm import METRICS, fake_module


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return cli_command(monkeypatch, capsys)


class TestEveryCommand:
    def test_help_loads_neither_torch_nor_rich(self) -> None:
        program = (
            "import sys\nfrom foredraft.cli.main import run\nsys.argv = ['foredraft', '--help']\n"
            "try:\n    run()\nexcept SystemExit as end:\n    assert end.code == 0\n"
            "print(sorted({'torch', 'rich', 'numpy', 'transformers', 'jinja2', 'tokenizers'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert all(name in done.stdout for name in ("demo", "generate", "chat", "models"))
        assert done.stdout.splitlines()[-1] == "[]"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ("generate hi --model nosuch", "There is no model 'nosuch'; give"),
            ("generate hi --head nosuch", "There is no model 'nosuch'; give"),
            ("generate hi --spec ngramm", "spec='ngramm' names the proposer 'ngramm'; there are"),
            ("generate hi --spec eagle+ngramm", "names the proposer 'ngramm'; there are"),
            ("generate hi --dtype int3", "dtype='int3' is not known; use auto,"),
            ("generate hi --activations int3", "activations='int3' is not known; use auto,"),
            ("generate hi --device tpu", "device='tpu' is not known; use auto, cpu or cuda."),
            ("generate hi --threads 0", "threads=0 must be"),
            ("chat --model nosuch", "There is no model 'nosuch'; give"),
            ("demo --model nosuch", "There is no model 'nosuch'; give"),
            ("serve --model nosuch", "There is no model 'nosuch'; give"),
            ("audit --spec ngramm", "spec='ngramm' names the proposer 'ngramm'; there are"),
            ("bench --spec ngramm", "spec='ngramm' names the proposer 'ngramm'; there are"),
            ("plan --measure --spec ngramm", "spec='ngramm' names the proposer 'ngramm'; there are"),
        ],
    )
    def test_what_is_mistyped_is_refused_before_torch_is_imported(self, arguments: str, sentence: str) -> None:
        program = (
            "import sys\nfrom foredraft.cli.main import run\n"
            "try:\n    run()\nexcept SystemExit as end:\n    assert end.code == 2\n"
            "print('torch' in sys.modules)"
        )
        call = [sys.executable, "-c", program, *arguments.split()]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        assert sentence in done.stderr
        assert done.stdout == "False\n"

    @pytest.mark.parametrize("name", ["demo", "generate", "chat", "models"])
    def test_each_has_help_and_takes_model_and_json(self, command: Command, name: str) -> None:
        result = command(name, "--help")
        assert result.code == 0
        assert "--json" in result.out
        assert "--model" in result.out

    def test_no_command_shows_help(self, command: Command) -> None:
        assert "Commands:" in command().out

    def test_version(self, command: Command) -> None:
        assert command("--version").out == f"foredraft {foredraft.__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["nonsense"], "No such command 'nonsense'."),
            (["generate", "hi", "--max-tokens", "many"], "--max-tokens"),
            (["generate", "hi", "--max-tokens", "0"], "max_tokens=0 must be a whole number from 1 to 2147483647."),
            (
                ["generate", "hi", "--temperature", "-1"],
                "temperature=-1.0 must be 0 (greedy) or a number from 1e-06 to 100.",
            ),
            (["generate", "hi", "--top-p", "0"], "top_p=0.0 must be a number above 0 up to 1."),
            (["generate", "hi", "--nonsense"], "--nonsense"),
            (["generate", "hi", "--model", "some/missing"], "some/missing is not a model; use foredraft models."),
            (["generate", "too long"], "The prompt is too long."),
            (["generate", "--file", "nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory."),
            (["chat", "--n", "2"], "--n"),
        ],
    )
    def test_bad_arguments_end_with_one_sentence(self, command: Command, arguments: list[str], sentence: str) -> None:
        result = command(*arguments)
        assert fails_with_one_sentence(result), result
        assert sentence in result.err

    @pytest.mark.parametrize("arguments", [["generate", "interrupt"], ["chat"]])
    def test_ctrl_c_ends_with_130_and_a_whole_line(self, command: Command, arguments: list[str]) -> None:
        result = command(*arguments, stdin="interrupt\n")
        assert (result.code, result.out, result.err) == (130, "Hello\n", "")
        assert result.log[-1] == ("close",)

    def test_the_model_is_closed_whatever_happens(self, command: Command) -> None:
        assert command("generate", "too long").log[-1] == ("close",)

    def test_the_garbage_collector_spares_what_was_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "foredraft.llm", fake_module([], None))
        with ModelOptions().open():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() == 0


class TestGenerate:
    @pytest.mark.parametrize(("arguments", "head"), [([], "auto"), (["--head", "none"], None)])
    def test_heads_are_found_unless_there_shall_be_none(
        self, command: Command, arguments: list[str], head: str | None
    ) -> None:
        opened = command("generate", "hi", *arguments).log[0]
        assert opened[2]["head"] == head

    def test_one_prompt_prints_its_text(self, command: Command) -> None:
        result = command("generate", "hi")
        assert (result.code, result.out, result.err) == (0, "Hello there.\n", "")

    def test_options_reach_the_model(self, command: Command) -> None:
        result = command(
            *"generate hi --model some/model --spec off --dtype int4 --activations int16 --device cpu".split(),
            *"--threads 2 --no-exact --max-tokens 5 --head some/head".split(),
            *"--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3".split(),
            *"--stop a --stop b --n 2 --logprobs 1".split(),
        )
        opened, queried, _ = result.log
        expected = {
            "spec": "off",
            "dtype": "int4",
            "activations": "int16",
            "device": "cpu",
            "threads": 2,
            "exact": False,
            "head": "some/head",
            "progress": None,
        }
        assert opened == ("open", "some/model", expected)
        assert queried[2] == SamplingParams(
            max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3, stop=["a", "b"], n=2, logprobs=1
        )

    def test_json_has_one_object_per_prompt_in_order(self, command: Command) -> None:
        result = command("generate", "one", "two", "--json")
        assert [record["index"] for record in result.records] == [0, 1]
        for record in result.records:
            assert set(record) == {"index", "text", "token_ids", "finish_reason", "seed", "metrics"}
            assert record["text"] == "Hello there."
            assert record["token_ids"] == [0, 1, 2]
            assert record["metrics"] == METRICS.__dict__
        assert result.err == ""

    def test_several_samples_and_logprobs_in_json(self, command: Command) -> None:
        (record,) = command("generate", "one", "--n", "2", "--logprobs", "1", "--json").records
        assert [sample["seed"] for sample in record["samples"]] == [7, 8]
        assert record["logprobs"][0] == {"token_id": 0, "logprob": -0.5, "top": {"0": -0.5}, "rank": 1}

    def test_many_texts_are_told_apart(self, command: Command) -> None:
        assert command("generate", "one", "two").out == "[0]\nHello there.\n\n[1]\nHello there.\n\n"
        assert command("generate", "one", "--n", "2").out.startswith("[0.0]\n")

    @pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
    def test_stdin_is_a_prompt(self, command: Command, arguments: list[str]) -> None:
        assert command(*arguments, stdin="a\nb\n").log[1][1] == ["a\nb"]

    def test_empty_stdin_is_an_error(self, command: Command) -> None:
        assert fails_with_one_sentence(command("generate"))

    def test_chat_queries_as_a_user(self, command: Command) -> None:
        assert command("generate", "hi", "--chat").log[1][1] == [[{"role": "user", "content": "hi"}]]

    def test_a_failed_request_is_told_and_exits_1(self, command: Command) -> None:
        result = command("generate", "hi", "--json", error="The logits are not numbers.")
        assert result.code == 1
        assert result.records[0]["error"] == "The logits are not numbers."
        assert result.err == "Prompt 0: The logits are not numbers.\n"

    def test_a_file_may_hold_all_kinds_of_prompts(self, command: Command, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "c"}]
        lines = [
            {"prompt": "a"},
            {"question_id": 1, "category": "x", "turns": ["b\u2028", "second"]},
            {"messages": messages},
        ]
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
        result = command("generate", "first", "--file", str(file), "--json")
        assert result.log[1][1] == ["first", "a", "b\u2028", messages]
        assert len(result.records) == 4

    @pytest.mark.parametrize(
        "line",
        ["{", "[]", "7", '{"text": "a"}', '{"prompt": 7}', '{"turns": []}', '{"turns": "a"}', '{"messages": ["a"]}'],
    )
    def test_a_malformed_line_is_named(self, command: Command, tmp_path: Path, line: str) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "fine"}\n\n' + line, encoding="utf-8")
        result = command("generate", "--file", str(file))
        assert fails_with_one_sentence(result), result
        assert f"{file}:3 " in result.err
        assert result.log == []

    @pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
    def test_a_file_without_prompts_is_an_error(self, command: Command, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(content)
        assert fails_with_one_sentence(command("generate", "--file", str(file)))


class TestChat:
    def test_a_piped_conversation_has_a_memory(self, command: Command) -> None:
        result = command("chat", "--system", "Be kind.", stdin="hi\n\nagain\n")
        assert result.out == "Hello there.\n" * 2
        assert result.log[2][1] == [
            [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "Hello there."},
                {"role": "user", "content": "again"},
            ]
        ]

    def test_figures_follow_each_answer(self, command: Command) -> None:
        assert command("chat", stdin="hi\n").err == "3 tokens, 10.0 tok/s, 1.00 tokens per run, seed 7\n"

    def test_figures_tell_whose_drafts_were_accepted(self, command: Command) -> None:
        result = command("chat", "--spec", "ngram+suffix", "--show-drafts", stdin="hi\n")
        assert result.err == "3 tokens, 10.0 tok/s, 3.00 tokens per run, drafted by ngram 1, suffix 1, seed 7\n"
        assert result.out == "Hello there.\n"  # no colours without a terminal

    def test_json_has_one_object_per_answer(self, command: Command) -> None:
        records = command("chat", "--json", stdin="hi\nagain\n").records
        assert [(record["index"], record["text"]) for record in records] == [(0, "Hello there."), (1, "Hello there.")]

    def test_commands(self, command: Command) -> None:
        result = command("chat", stdin="hi\n/reset\n/system Be brief.\n/system\n/help\n/what\nagain\n/exit\nnever\n")
        queried = [entry[1][0] for entry in result.log if entry[0] == "ask"]
        assert queried[1:] == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "again"}]]
        assert "/exit" in result.err
        assert "/what is not known." in result.err
        assert "Be brief.\n" in result.err

    def test_a_failed_answer_ends_a_piped_conversation(self, command: Command) -> None:
        result = command("chat", stdin="hi\n", error="The logits are not numbers.")
        assert (result.code, result.err) == (2, "The logits are not numbers.\n")
