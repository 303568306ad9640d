"""What a request may rely on: stops, samples, logprobs, streams, aborts."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.batch import PackedBatch
from foredraft.engine.chunks import ChunkLimit
from foredraft.errors import InvalidPrompt
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec, parse_spec
from foredraft.runtime.runner import ForwardOutput
from tests.tiny_models import VOCAB, random_model, save_model

PROMPT = [5, 9, 200, 17, 33]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=8, kv_cache_tokens=1024)


def with_fields(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields})


def is_idle(llm: LLM) -> bool:
    llm.engine.scheduler.check_integrity()
    pool = llm.engine.scheduler.pool
    return not llm.engine.has_work and pool.num_free_blocks == pool.num_blocks


def test_samples_have_seeds_that_repeat_them(llm: LLM) -> None:
    output = llm.generate([PROMPT], with_fields(temperature=1.2, n=4))[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    for sample in output.outputs:
        again = llm.generate([PROMPT], with_fields(temperature=1.2, seed=sample.seed))[0]
        assert again.token_ids == sample.token_ids
    same_request = llm.generate([PROMPT], with_fields(temperature=1.2, n=4, seed=output.seed))[0]
    assert [s.token_ids for s in same_request.outputs] == [s.token_ids for s in output.outputs]


def test_outputs_keep_the_order_of_the_inputs_and_match_single_runs(llm: LLM) -> None:
    prompts = [[i + 1, 2 * i + 3, 7] for i in range(20)]
    params = [with_fields(max_tokens=1 + i % 7, temperature=0.7 * (i % 2), seed=i) for i in range(20)]
    together = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        assert output.token_ids == llm.generate([prompt], each)[0].token_ids
        assert output.finish_reason == "length"
        assert len(output.token_ids) == each.max_tokens
    assert is_idle(llm)


def test_eos_and_stop_tokens_end_a_text(llm: LLM) -> None:
    plain = llm.generate([PROMPT], GREEDY)[0].token_ids
    third = plain[2]
    cut = llm.generate([PROMPT], with_fields(stop_token_ids=[third]))[0]
    assert cut.token_ids == plain[: plain.index(third) + 1]
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", third)
    llm.engine.eos_token_ids = frozenset([third])
    assert llm.generate([PROMPT], with_fields(ignore_eos=False))[0].token_ids == cut.token_ids
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == plain


def test_a_stop_string_across_tokens_is_cut_out_and_never_shown(llm: LLM) -> None:
    bias = {llm.tokenizer.encode(letter)[0]: 0.0 for letter in "abc"}
    bias = dict.fromkeys(bias, 100.0)
    free = llm.generate([PROMPT], with_fields(logit_bias=bias, temperature=5.0, seed=4, max_tokens=30))[0]
    assert set(free.text) <= set("abc")
    stop = free.text[10:13]
    params = with_fields(logit_bias=bias, temperature=5.0, seed=4, max_tokens=30, stop=[stop, "zzz"])
    expected = free.text[: free.text.index(stop)]
    events = list(llm.stream(PROMPT, params))
    assert "".join(event.text for event in events) == expected
    assert events[-1].output is not None
    assert events[-1].output.text == expected
    assert (events[-1].finish_reason, events[-1].output.stop_reason) == ("stop", stop)
    assert [event.token_id for event in events] == free.token_ids[: len(expected) + len(stop)]


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    output = llm.generate([PROMPT], with_fields(logprobs=3, prompt_logprobs=2, temperature=1.0, seed=5))[0]
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert [entry.token_id for entry in output.prompt_logprobs] == PROMPT[1:]
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.logprob <= max(entry.top.values()) <= 0
    # The prompt's logprobs are what the same tokens get as output: row by row the same distribution.
    replay = llm.generate([PROMPT + output.token_ids], with_fields(prompt_logprobs=3, max_tokens=1))[0]
    assert replay.prompt_logprobs is not None
    assert replay.prompt_logprobs[-len(output.token_ids) :] == output.logprobs


def test_prompt_logprobs_do_not_depend_on_chunks_or_preemption(folder: Path, llm: LLM) -> None:
    prompts = [[(3 * i + j) % VOCAB for j in range(50)] for i in range(4)]
    params = with_fields(prompt_logprobs=1, max_tokens=30)
    small = LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=7, kv_cache_tokens=192)
    outputs = small.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for chunked, whole in zip(outputs, llm.generate(prompts, params), strict=True):
        assert chunked.prompt_logprobs == whole.prompt_logprobs
        assert len(chunked.prompt_logprobs or ()) == 49


def test_a_long_prompt_is_cut_into_chunks_beside_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step takes about max_chunk_s. The text does not change, and alone the prompt runs as before."""
    long = [(3 * place) % VOCAB for place in range(300)]
    llm.engine.scheduler.pool.prefix_caching = False
    alone = llm.generate([long], GREEDY)[0].token_ids
    rows: list[int] = []
    forward = llm.engine.runner.forward

    def counted(batch: PackedBatch) -> ForwardOutput:
        rows.append(batch.num_rows)
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", counted)
    monkeypatch.setattr(llm.engine, "chunk_limit", ChunkLimit(0.125))
    monkeypatch.setattr(llm.engine, "clock", lambda: 0.002 * sum(rows))
    llm.engine.add("stream", PROMPT, with_fields(max_tokens=40), Spec())
    llm.engine.step()
    llm.engine.add("long", long, GREEDY, Spec())
    written = []
    while llm.engine.has_work:
        written += [event.token_id for event in llm.engine.step() if event.request_id == "long"]
    assert rows[:9] == [5, 16, 48, 48, 48, 48, 48, 48, 1 + 300 - 15 - 6 * 47], (
        "2 ms a row: 48 rows in four fifths of 0.125 s"
    )
    assert written == alone
    rows.clear()
    llm.generate([long], GREEDY)
    assert rows[0] == 300


def test_plain_decoding_is_not_charged_for_the_drafts_of_others(llm: LLM) -> None:
    plain, drafted = llm.generate([PROMPT, PROMPT], GREEDY, spec=["off", "ngram"])
    assert plain.metrics.draft_time_s == 0
    assert drafted.metrics.draft_time_s > 0
    assert plain.metrics.verify_time_s > 0


def test_a_stream_left_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream(PROMPT, with_fields(max_tokens=100))
    assert next(stream).token_id is not None
    assert not is_idle(llm)
    stream.close()  # type: ignore[attr-defined]
    assert is_idle(llm)


def test_calls_may_overlap(llm: LLM) -> None:
    other = [4, 5, 6]
    alone = {prompt[0]: llm.generate([prompt], GREEDY)[0].token_ids for prompt in (PROMPT, other)}
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(other, GREEDY)
    events = [next(first)]
    between = llm.generate([other, PROMPT], GREEDY)
    assert [output.token_ids for output in between] == [alone[4], alone[5]]
    assert [output.request_id for output in between] == ["0", "1"]
    seconds = [next(second), next(second)]
    events += first
    seconds += second
    assert [event.token_id for event in events] == alone[5]
    assert [event.token_id for event in seconds] == alone[4]
    assert {event.request_id for event in (*events, *seconds)} == {"0"}
    assert is_idle(llm)
    assert not llm._inboxes


def test_a_call_that_fails_or_is_refused_ends_no_other(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    events = [next(stream)]
    with pytest.raises(InvalidPrompt):
        llm.generate([PROMPT, [VOCAB + 5]], GREEDY)
    left = llm.stream(PROMPT, GREEDY)
    next(left)
    left.close()  # type: ignore[attr-defined]
    events += stream
    assert (len(events), events[-1].finish_reason) == (12, "length")


def test_a_stream_is_told_when_it_is_ended_from_elsewhere(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("just now")

    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.close()
    assert [event.finish_reason for event in stream] == ["abort"]

    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.speculation, "observe", observe)
        with pytest.raises(RuntimeError, match="just now"):
            llm.generate([PROMPT], GREEDY)
    (last,) = stream
    assert last.output is not None
    assert (last.finish_reason, last.output.error) == (
        "error",
        "The engine failed while this request ran: just now.",
    )
    assert is_idle(llm)


def test_a_request_that_nobody_follows_has_one_event_for_each_sample(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, logprobs=1, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs
    llm.engine.add("unfollowed", [5, 6, 7], params, parse_spec("ngram"), is_followed=False)
    events = []
    while llm.engine.has_work:
        events += llm.engine.step()
    outputs = sorted((event.output for event in events if event.output is not None), key=lambda output: output.index)
    assert len(events) == len(outputs) == 2
    for got, wanted in zip(outputs, expected, strict=True):
        assert (got.text, got.token_ids, got.logprobs) == (wanted.text, wanted.token_ids, wanted.logprobs)
    followed = "".join(event.text for event in llm.stream([5, 6, 7], replace(params, n=1)))
    assert followed == expected[0].text


def test_progress_counts_prompts(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate([PROMPT, [4, 5, 6]], with_fields(n=2), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_chat_takes_one_or_many_texts_ids_or_messages(folder: Path, tmp_path: Path) -> None:
    template = "<s>{% for message in messages %}{{ message.role }}:{{ message.content }}{% endfor %}"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    llm = LLM(str(tmp_path))
    hello, ids = [{"role": "user", "content": "hello"}], [7, 8, 9]
    rendered = llm.tokenizer.encode("<s>user:hello", add_special_tokens=False)

    def queried(conversations: Any) -> list[list[int]]:
        return [output.prompt_token_ids for output in llm.chat(conversations, with_fields(max_tokens=1))]

    for one, expected in (("hello", rendered), (hello, rendered), (ids, ids)):
        assert queried(one) == [expected]
        assert queried([one, one]) == [expected, expected]
    assert queried(["hello", hello, ids]) == [rendered, rendered, ids]


def test_one_bad_prompt_leaves_nothing_of_the_others_behind(llm: LLM) -> None:
    with pytest.raises(InvalidPrompt):
        llm.generate([PROMPT, [VOCAB + 5]], GREEDY)
    assert is_idle(llm)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_after_its_commits_leaves_nothing_behind(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished texts have left the scheduler by then, but not yet the engine."""

    def observe(*args: Any, **kwargs: Any) -> None:
        raise error("just now")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.speculation, "observe", observe)
        with pytest.raises(error, match="just now"):
            llm.generate([PROMPT, [4, 5, 6]], [with_fields(max_tokens=1), GREEDY])
    assert is_idle(llm)
    assert llm.generate([PROMPT], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("spec", ["suffix", "quantised"])
def test_a_salt_that_is_no_utf8_is_a_salt_like_any_other(folder: Path, spec: str) -> None:
    """JSON may write lone surrogates. Beside such a salt other requests go on, and equal salts share a prefix."""
    llm = LLM(str(folder), prefix_salt="\udfff", kv_cache_tokens=1024)
    long = [(7 * place) % VOCAB for place in range(40)]
    salted = [with_fields(cache_salt="\ud800"), with_fields(cache_salt="\ud801"), with_fields(cache_salt="\ud800")]
    plain = llm.generate([PROMPT], GREEDY)[0].token_ids
    beside, *found = llm.generate([PROMPT, long, long], [GREEDY, *salted[:2]], spec=spec)
    assert (beside.error, beside.token_ids) == (None, plain)
    assert [output.metrics.cached_tokens for output in found] == [0, 0]
    (again,) = llm.generate([long], salted[2], spec=spec)
    assert (again.metrics.cached_tokens, again.token_ids) == (32, found[0].token_ids)


def test_a_character_split_between_prompt_and_output_is_not_lost(llm: LLM) -> None:
    start, *rest = llm.tokenizer.encode("é", add_special_tokens=False)
    assert len(rest) == 1
    (output,) = llm.generate([[*PROMPT, start]], with_fields(max_tokens=2, logit_bias={rest[0]: 100.0}))
    assert output.token_ids == rest * 2
    assert output.text == "é\ufffd"


def test_metrics_tell_drafts_by_depth_and_the_time_they_saved(folder: Path) -> None:
    llm = LLM(str(folder), max_num_seqs=8, kv_cache_tokens=1024)
    output = llm.generate([PROMPT * 6], with_fields(max_tokens=64), spec="ngram:k=4")[0]
    metrics = output.metrics
    assert metrics.drafts == metrics.drafted_per_depth[0] > 0
    assert sum(metrics.drafted_per_depth) == metrics.drafted_tokens == sum(metrics.drafted_by_origin.values())
    assert sum(metrics.accepted_per_depth) == metrics.accepted_tokens
    assert metrics.saved_time_s != 0
    assert 0 <= metrics.queue_time_s <= metrics.time_to_first_token_s
    assert llm.generate([PROMPT], GREEDY, spec="off")[0].metrics.saved_time_s == 0


def test_the_first_event_of_a_step_carries_its_draft(llm: LLM) -> None:
    """Drafts and accepted nodes of all steps give the tokens of the stream, their origins and the metrics."""
    first, events = (list(llm.stream(PROMPT, with_fields(max_tokens=60), spec="suffix")) for _ in range(2))
    assert [event.token_id for event in first] == [event.token_id for event in events]
    output = events[-1].output
    assert output is not None and output.metrics.accepted_tokens > 0
    emitted: list[tuple[int | None, str]] = []
    for event in events:
        if event.draft is None:
            continue
        assert emitted == [(each.token_id, each.origin) for each in events[: len(emitted)]]
        emitted += [(event.draft.tokens[node], event.draft.origin[node]) for node in event.accepted]
        if len(emitted) < len(events):  # else the draft's last token ended the sequence
            emitted.append((events[len(emitted)].token_id, "target"))
    assert [(event.token_id, event.origin) for event in events] == emitted
    drafts = [event.draft for event in events if event.draft is not None]
    assert len(drafts) == output.metrics.target_runs
    assert sum(map(len, drafts)) == output.metrics.drafted_tokens


def test_the_first_event_of_a_step_tells_the_reasons(llm: LLM) -> None:
    events = list(llm.stream(PROMPT, with_fields(max_tokens=20), spec="auto"))
    output = events[-1].output
    assert output is not None and output.metrics.decisions
    assert Counter(reason for event in events for reason in event.reasons) == output.metrics.decisions
