"""What other peers answer may be anything: each comparison ends with one printable, bounded finding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging.doctor.comparison import (
    compare_clocks,
    compare_options,
    compare_runs,
    compare_schemas,
    compare_software,
    compare_strategies,
    difference_by_name,
    judge_call_back,
    judge_nat,
)
from averaging.doctor.findings import MAX_FINDING, Finding, Severity
from averaging.protocol import CompressionType, MeanOver, TopK
from averaging.tensors import Schema, describe

ANY = st.text() | st.just("\x1b[2J" + "x" * 10_000)


def schema(**shapes: tuple[int, ...]) -> Schema:
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return describe(tuple(tensors), tuple(tensors.values()), part_size_bytes=1024)


def check(finding: Finding) -> None:
    for text in (finding.text, finding.remedy):
        assert text.isprintable()
        assert len(text) <= MAX_FINDING


@given(ANY, ANY, st.dictionaries(st.sampled_from(["compression", "aggregation", "other"]), ANY), st.floats())
def test_texts_and_numbers_of_strangers(text: str, outcome: str, options: dict[str, str], number: float) -> None:
    check(compare_runs("run", text, "a:1"))
    check(compare_runs(None, text, "a:1"))
    check(compare_software("averaging 1", text, "a:1"))
    check(compare_strategies("diloco", text, "a:1"))
    check(compare_options({"compression": "none", "aggregation": "mean"}, options, "a:1"))
    check(compare_clocks(0.1, number, "a:1"))
    check(judge_call_back(outcome, text, number, "b:2", "a:1", listening=True))
    check(judge_nat(outcome, "b:2", "c:2", "a:1"))


@pytest.mark.parametrize(
    ("bound", "ahead", "severity"),
    [
        (0.01, 0.2, Severity.OK),
        (0.01, -2.9, Severity.WARNING),
        (0.01, 3.2, Severity.FAILURE),
        (2.0, 3.2, Severity.WARNING),  # it may be less
        (0.01, math.nan, Severity.FAILURE),
        (0.01, math.inf, Severity.FAILURE),
    ],
)
def test_clocks(bound: float, ahead: float, severity: Severity) -> None:
    assert compare_clocks(bound, ahead, "a:1").severity is severity


def test_one_option_may_be_a_strategy_s_own() -> None:
    ours = {"compression": "none", "aggregation": "mean"}
    assert compare_options(ours, {"compression": "float16", "aggregation": "mean"}, "a:1").severity is Severity.WARNING
    both = compare_options(ours, {"compression": "float16", "aggregation": "median"}, "a:1")
    assert both.severity is Severity.FAILURE
    assert compare_options(ours, {}, "a:1").text.startswith("0 options")


def test_the_first_difference_is_found_by_name() -> None:
    ours = schema(a=(2,), b=(3,), c=(4,))
    assert difference_by_name(ours, schema(a=(2,), b=(3,), c=(4,))) is None
    other_order = schema(a=(2,), c=(4,), b=(3,))
    assert difference_by_name(ours, other_order) is not None
    assert "in another order" in compare_schemas(ours, other_order, "a:1").text
    assert compare_schemas(ours, schema(a=(2,), c=(4,), b=(5,)), "a:1").severity is Severity.FAILURE
    assert difference_by_name(ours, schema(b=(3,), c=(4,))) == "tensor 'a' (float32[2] as NONE) is only here"
    assert difference_by_name(schema(b=(3,)), schema(a=(2,), b=(3,))) == "tensor 'a' (float32[2] as NONE) is only there"
    wrapped = describe(["module.a"], [torch.zeros(2)], part_size_bytes=1024)
    assert difference_by_name(wrapped, schema(a=(2,))) is None
    unnamed = describe(["tensor_0"], [torch.zeros(2)], part_size_bytes=1024)
    assert "float32[3]" in str(difference_by_name(unnamed, schema(a=(3,))))


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (TopK(1 / 32), "density of top_k is 1/64 here and 1/32 there"),
        (TopK(bits=4), "bits of top_k is 2 here and 4 there"),
        (TopK(mean_over=MeanOver.ALL), "mean_over of top_k is senders here and all there"),
    ],
)
def test_other_options_of_top_k_are_named(theirs: TopK, difference: str) -> None:
    ours = describe(
        ["a"], [torch.zeros(2)], part_size_bytes=1024, compression=CompressionType.TOP_K, sparse=TopK(), topic="change"
    )
    finding = compare_schemas(ours, replace(ours, sparse=theirs), "a:1")
    assert (finding.severity, finding.text) == (Severity.FAILURE, difference)
    assert "options of the strategy" in finding.remedy
    check(finding)


def test_rounds_of_different_things_are_not_compared() -> None:
    gradients = describe(["a"], [torch.zeros(2)], part_size_bytes=1024, topic="gradients")
    assert compare_schemas(schema(a=(2,)), gradients, "a:1").severity is Severity.WARNING
