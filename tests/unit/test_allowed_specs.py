"""What requests may ask for where one process serves people who do not own it."""

from __future__ import annotations

import pytest

from foredraft.errors import InvalidSpec
from foredraft.proposers.allowed_specs import AllowedSpecs
from foredraft.proposers.registry import parse_spec

ALLOWED = AllowedSpecs(["auto", "ngram", "suffix:k=8,min_n=3", "draft_model:model=small,k=3", "auto(ngram+quantised)"])


@pytest.mark.parametrize(
    "spec",
    [
        "off",
        "auto",
        "ngram",
        "suffix:min_n=3,k=8",
        "draft_model:model=small,k=3",
        "draft_model:k=3,model=small",
        "ngram+suffix:k=8,min_n=3+draft_model:model=small,k=3",
        "auto(ngram:k=3)",
        "auto(ngram+suffix:k=8,min_n=3)",
        "auto(ngram+quantised)",
    ],
)
def test_what_is_allowed_is_parsed(spec: str) -> None:
    assert ALLOWED.check(spec) == parse_spec(spec)


@pytest.mark.parametrize(
    "spec", ["ngram:k=64", "ngram:k=3,max_n=8", "ngram:k=2+suffix:k=8,min_n=3+draft_model:model=small,k=3"]
)
def test_options_of_a_request_run_under_the_controller(spec: str) -> None:
    assert not parse_spec(spec).adaptive
    assert ALLOWED.check(spec) == parse_spec(f"auto({spec})")


def test_an_entry_with_options_runs_as_it_stands() -> None:
    allowed = AllowedSpecs(["ngram", "ngram:k=6", "suffix:k=4+ngram:k=3"])
    for spec in ("ngram", "ngram:k=6", "suffix:k=4+ngram:k=3"):
        assert allowed.check(spec) == parse_spec(spec)
    assert allowed.check("ngram:k=7").adaptive
    with pytest.raises(InvalidSpec, match="is not allowed here"):
        allowed.check("suffix:k=4")


def test_what_cannot_run_under_the_controller_keeps_the_options_of_its_entry() -> None:
    allowed = AllowedSpecs(["lookahead", "lookahead:window=8", "ngram"])
    for spec in ("lookahead", "lookahead:window=8", "lookahead+ngram"):
        assert allowed.check(spec) == parse_spec(spec)
    for spec in ("lookahead:window=16", "lookahead+ngram:k=64"):
        with pytest.raises(InvalidSpec, match="needs its whole draft verified; allowed as they stand are off, lookahe"):
            allowed.check(spec)


def test_what_outlives_a_request_is_not_its_choice() -> None:
    """`store` is memory for answers, and every proposer with options of its own has one."""
    large = "suffix:store=10000000"
    for spec in (large, f"auto({large})", f"ngram+{large}"):
        with pytest.raises(InvalidSpec, match="is not allowed here"):
            AllowedSpecs(["auto", "ngram", "suffix"]).check(spec)
    assert AllowedSpecs([large]).check(f"auto({large})") == parse_spec(f"auto({large})")


@pytest.mark.parametrize(
    "spec",
    [
        "suffix",
        "suffix:k=9,min_n=3",
        "quantised",
        "auto(quantised)",
        "ngram+quantised",
        "ngram:which=earliest",
        "draft_model:model=/etc/passwd,k=3",
        "draft_model:model=small",
        "ngram+draft_model:model=someone/model",
        "auto(ngram+draft_model:model=someone/model)",
        "staged:chain=ngram>draft_model(model=/etc/passwd)",
        "staged:chain=draft_model(model=small;k=3)>draft_model(model=someone/model)",
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        ALLOWED.check(spec)
    assert str(refusal.value) == (
        f"spec={spec!r} is not allowed here; allowed are off, auto, ngram, suffix:k=8,min_n=3, "
        "draft_model:model=small,k=3, auto(ngram+quantised)."
    )


def test_a_name_allows_numbers_only() -> None:
    """Text may name a file, also in a chain of stages."""
    allowed = AllowedSpecs(["staged"])
    assert allowed.check("staged:k=3") == parse_spec("auto(staged:k=3)")
    with pytest.raises(InvalidSpec, match="is not allowed here; allowed are off, staged"):
        allowed.check("staged:chain=ngram>draft_model(model=/etc/passwd)")
    chain = "staged:chain=ngram>draft_model(model=small)"
    assert AllowedSpecs([chain]).check(chain) == parse_spec(chain)


def test_nothing_but_off_is_allowed_without_entries() -> None:
    assert AllowedSpecs([]).check("off") == parse_spec("off")
    for spec in ("auto", "ngram"):
        with pytest.raises(InvalidSpec, match=r"allowed are off\.$"):
            AllowedSpecs([]).check(spec)


@pytest.mark.parametrize("spec", [None, 3, "nothing", "ngram:k=0"])
def test_what_is_no_spec_says_so(spec: object) -> None:
    with pytest.raises(InvalidSpec) as plain:
        parse_spec(spec)
    with pytest.raises(InvalidSpec) as refusal:
        ALLOWED.check(spec)
    assert str(refusal.value) == str(plain.value)
    with pytest.raises(InvalidSpec):
        AllowedSpecs([spec])  # type: ignore[list-item]
