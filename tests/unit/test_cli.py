"""The command line: what it prints where, and how it ends. The model is a stand-in."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.cli.chat import _Presses, _typed
from foredraft.cli.main import COMMANDS
from foredraft.cli.options import ModelOptions
from foredraft.errors import InvalidParameter
from foredraft.params import SamplingParams
from tests.unit.cli_command import Command, cli_command, fails_with_one_sentence
from tests.unit.fake_llm import METRICS, fake_module


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return cli_command(monkeypatch, capsys)


class TestEveryCommand:
    @pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=str)
    def test_help_loads_nothing_that_takes_long(self, arguments: list[str]) -> None:
        slow = (
            "{'torch', 'rich', 'numpy', 'pydantic', 'transformers', 'jinja2', 'tokenizers', 'huggingface_hub', "
            "'fastapi', 'uvicorn', 'matplotlib', 'asyncio', 'statistics', 'html'}"
        )
        folders = ("audit", "bench", "plan", "simulate", "train", "server", "engine")
        ours = {f"foredraft.{folder}" for folder in folders}
        program = (
            f"import sys\nfrom foredraft.cli.main import run\nsys.argv = ['foredraft', *{arguments}, '--help']\n"
            "try:\n    run()\nexcept SystemExit as end:\n    assert end.code == 0\n"
            f"print(sorted(({slow} | {ours}) & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert all(name in done.stdout for name in arguments or COMMANDS)
        assert done.stdout.splitlines()[-1] == "[]"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ("generate hi --model nosuch", "There is no model 'nosuch'; give"),
            ("generate hi --head nosuch", "There is no head 'nosuch'; give"),
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
            ("run nosuch", "There is no model 'nosuch'; give"),
            ("pull nosuch", "There is no model 'nosuch'; give"),
            ("train hydra --out x", "'hydra' cannot be trained; use eagle,"),
            ("train eagle --out x --minutes -1", "--minutes -1.0 must be a number above 0."),
            ("train eagle --out x --model nosuch", "There is no model 'nosuch'; give"),
            ("export x y --to vllm --model nosuch", "There is no model 'nosuch'; give"),
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

    @pytest.mark.parametrize("name", COMMANDS)
    def test_each_has_help_and_takes_model_and_json(self, command: Command, name: str) -> None:
        result = command(name, "--help")
        assert result.code == 0
        assert result.out.startswith(f"Usage: foredraft {name} ")
        assert "--json" in result.out or name == "serve"
        assert "--model" in result.out or "MODEL" in result.out

    def test_no_command_shows_help(self, command: Command) -> None:
        assert "Commands:" in command().out

    def test_version(self, command: Command) -> None:
        assert command("--version").out == f"foredraft {foredraft.__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["nonsense"], "No such command 'nonsense'; foredraft --help lists them."),
            (["generat"], "No such command 'generat' (did you mean 'generate'?)"),
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
            assert gc.get_freeze_count() > 1000 and gc.isenabled()
        assert gc.get_freeze_count() == 0

    def test_the_garbage_collector_rests_while_a_model_is_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[bool] = []

        def fail(*_: Any, **__: Any) -> None:
            seen.append(gc.isenabled())
            raise InvalidParameter("no")

        module = fake_module([], None)
        monkeypatch.setattr(module, "LLM", fail)
        monkeypatch.setitem(sys.modules, "foredraft.llm", module)
        with pytest.raises(InvalidParameter), ModelOptions().open():
            pass
        assert seen == [False] and gc.isenabled()


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


class TestRun:
    def test_it_answers_a_prompt_and_leaves(self, command: Command) -> None:
        result = command("run", "smollm2", "Why", "is it so?", "--temperature", "0")
        assert (result.code, result.out) == (0, "Hello there.\n")
        opened, asked, _ = result.log
        assert opened[1] == "smollm2" and asked[1] == [[{"role": "user", "content": "Why is it so?"}]]

    @pytest.mark.parametrize(
        ("words", "asked"),
        [
            (["Explain", "this:"], "Explain this:\n\n  def f():\n\n    pass"),
            ([], "  def f():\n\n    pass"),
        ],
    )
    def test_what_is_piped_in_stands_below_the_prompt(self, command: Command, words: list[str], asked: str) -> None:
        result = command("run", "some/model", *words, stdin="  def f():\n\n    pass\n")
        assert (result.code, result.out) == (0, "Hello there.\n")
        assert result.log[1][1] == [[{"role": "user", "content": asked}]]

    def test_nothing_at_all_is_an_error(self, command: Command) -> None:
        result = command("run", "some/model", stdin="\n")
        assert fails_with_one_sentence(result) and "pipe a text in" in result.err and not result.log

    def test_pull_fetches(self, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        fetched: list[str] = []
        monkeypatch.setattr("foredraft.cli.models.fetched", fetched.append)
        (record,) = command("pull", str(tmp_path), "--json").records
        assert fetched == [str(tmp_path)] and record["path"] == str(tmp_path)


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

    def asked(self, command: Command, stdin: str) -> tuple[list[Any], str]:
        """What the model was asked: conversation, parameters and spec of each; and the remarks."""
        result = command("chat", stdin=stdin)
        assert result.code == 0
        return [(entry[1][0], entry[2], entry[3]) for entry in result.log if entry[0] == "ask"], result.err

    def test_settings(self, command: Command) -> None:
        typed = '/set temperature 0.5\n/set stop ["a", "b"]\n/set seed 3\n/set\nhi\n/set seed none\nhi\n'
        ((_, first, _), (_, second, _)), told = self.asked(command, typed)
        assert (first.temperature, first.stop, first.seed, second.seed) == (0.5, ("a", "b"), 3, None)
        assert "temperature is 0.5 now.\n" in told and "top_p                the default\n" in told

    def test_wrong_settings_change_nothing(self, command: Command) -> None:
        ((_, params, _),), told = self.asked(command, "/set top_p 2\n/set heat 1\n/set top_k much\nhi\n")
        assert params == SamplingParams(max_tokens=512)
        assert "top_p=2 must be a number above 0 up to 1." in told and "top_k='much' must be" in told
        assert "There is no setting heat; there are max_tokens, temperature" in told

    def test_speculation(self, command: Command) -> None:
        asked, told = self.asked(command, "hi\n/spec ngram+suffix\nhi\n/spec ngramm\n/spec\nhi\n")
        assert [spec for _, _, spec in asked] == ["auto", "ngram+suffix", "ngram+suffix"]
        assert "names the proposer 'ngramm'" in told and "\nngram+suffix\n" in told

    def test_an_answer_again(self, command: Command) -> None:
        asked, told = self.asked(command, "/regen\nhi\n/regen\n")
        assert [turns for turns, _, _ in asked] == [[{"role": "user", "content": "hi"}]] * 2
        assert "There is no answer yet.\n" in told and "/set temperature 0.8" in told

    def test_a_conversation_is_saved_as_a_prompt(self, command: Command, tmp_path: Path) -> None:
        file = tmp_path / "talk.jsonl"
        told = command("chat", "--system", "Be kind.", stdin=f"hi\n/save {file}\n/save\n/save {tmp_path}\n").err
        assert f"Saved 2 turns in {file}." in told and "Say where: /save FILE." in told and "cannot be written" in told
        (record,) = map(json.loads, file.read_text().splitlines())
        assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
        assert command("generate", "--file", str(file)).log[1][1] == [record["messages"]]

    def test_ctrl_c_at_the_prompt_says_how_to_leave(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typed = iter([KeyboardInterrupt, "hi", "not \\", KeyboardInterrupt, "again", EOFError])

        def read(prompt: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        assert list(_typed(True, _Presses())) == ["hi", "again"]
        assert capsys.readouterr().err.count("Ctrl-C again, Ctrl-D or /exit leaves.") == 2

    def test_ctrl_c_twice_at_the_prompt_is_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(prompt: str) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr("builtins.input", interrupt)
        assert list(_typed(True, _Presses())) == []

    @pytest.mark.parametrize(
        ("typed", "text"),
        [
            ('"""one\ntwo"""\n', "one\ntwo"),
            ('"""\none\n\n/two\n"""\n', "one\n\n/two"),
            ("one \\\ntwo\n", "one \ntwo"),
        ],
    )
    def test_several_lines(self, command: Command, typed: str, text: str) -> None:
        ((turns, _, _),), _ = self.asked(command, typed)
        assert turns == [{"role": "user", "content": text}]

    def test_a_failed_answer_ends_a_piped_conversation(self, command: Command) -> None:
        result = command("chat", stdin="hi\n", error="The logits are not numbers.")
        assert (result.code, result.err) == (2, "The logits are not numbers.\n")
