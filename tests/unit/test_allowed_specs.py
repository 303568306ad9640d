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
        "ngram:k=3,max_n=8",
        "suffix:min_n=3,k=8",
        "draft_model:model=small,k=3",
        "draft_model:k=3,model=small",
        "ngram:k=2+suffix:k=8,min_n=3+draft_model:model=small,k=3",
        "auto(ngram+suffix:k=8,min_n=3)",
        "auto(ngram+quantised)",
    ],
)
def test_what_is_allowed_is_parsed(spec: str) -> None:
    assert ALLOWED.check(spec) == parse_spec(spec)


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
    assert allowed.check("staged:k=3") == parse_spec("staged:k=3")
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
