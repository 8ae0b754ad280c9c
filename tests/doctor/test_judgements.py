"""What other peers answer may be anything: each judgement ends with one printable, bounded finding."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.config import PeerConfig
from averaging.doctor import Finding, Severity
from averaging.doctor.checks import MAX_FINDING
from averaging.doctor.other_peer import (
    Visit,
    difference_of,
    judge_call_back,
    judge_clock,
    judge_options,
    judge_run,
    judge_schema,
    judge_software,
    judge_strategy,
)
from averaging.probe import DialOutcome
from averaging.tensors import Schema, describe
from averaging.wire import probe_pb2

ANY = st.text() | st.just("\x1b[2J" + "x" * 10_000)


def peer(schema: Schema | None = None, strategy: str = "") -> Visit:
    known = {what: ("here", value) for what, value in (("schema", schema), ("strategy", strategy)) if value}
    return Visit("a:1", PeerConfig(run_id="run"), None, "", known)


def schema(**shapes: tuple[int, ...]) -> Schema:
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return describe(tuple(tensors), tuple(tensors.values()), part_size_bytes=1024)


def described(**options: str) -> probe_pb2.Description:
    return probe_pb2.Description(options=options)


def check(finding: Finding | None) -> None:
    for text in (finding.text, finding.remedy) if finding else ():
        assert text.isprintable()
        assert len(text) <= MAX_FINDING


@given(ANY, ANY, st.dictionaries(st.sampled_from(["compression", "aggregation", "other"]), ANY), st.floats())
def test_texts_and_numbers_of_strangers(text: str, outcome: str, options: dict[str, str], number: float) -> None:
    text, outcome = (each.encode(errors="replace").decode() for each in (text, outcome))
    options = {name: value.encode(errors="replace").decode() for name, value in options.items()}
    check(judge_run(peer(), probe_pb2.Description(run_id=text)))
    check(judge_software(peer(), probe_pb2.Description(software=text)))
    check(judge_strategy(peer(strategy="diloco"), text))
    check(judge_options(peer(), described(**options)))
    check(judge_clock(peer(), (number, 0.1)))
    for caller in ("", "203.0.113.9"):
        reply = probe_pb2.DialBackReply(outcome=outcome, reason=text, seconds=number, caller=caller, at_caller=text)
        check(judge_call_back(peer(), ("b:2", True, reply)))


@pytest.mark.parametrize(
    ("ahead", "bound", "severity"),
    [
        (0.2, 0.01, Severity.OK),
        (-2.9, 0.01, Severity.WARNING),
        (3.2, 0.01, Severity.FAILURE),
        (3.2, 2.0, Severity.WARNING),  # it may be less
        (math.nan, 0.01, Severity.FAILURE),
        (math.inf, 0.01, Severity.FAILURE),
    ],
)
def test_clocks(ahead: float, bound: float, severity: Severity) -> None:
    assert judge_clock(peer(), (ahead, bound)).severity is severity


def test_one_option_may_be_a_strategy_s_own() -> None:
    assert judge_options(peer(), described(compression="float16", aggregation="mean")).severity is Severity.WARNING
    both = judge_options(peer(), described(compression="float16", aggregation="median"))
    assert both.severity is Severity.FAILURE
    assert judge_options(peer(), described()).text.startswith("0 options")


def test_the_first_difference_is_found_by_name() -> None:
    ours = schema(a=(2,), b=(3,), c=(4,))
    assert difference_of(ours, schema(a=(2,), b=(3,), c=(4,))) is None
    other_order = schema(a=(2,), c=(4,), b=(3,))
    assert difference_of(ours, other_order) is None
    reordered = judge_schema(peer(ours), other_order)
    assert (reordered.severity, "in another order" in reordered.text) == (Severity.WARNING, True)
    other_shape = judge_schema(peer(ours), schema(a=(2,), c=(4,), b=(5,)))
    assert other_shape.severity is Severity.FAILURE
    assert "tensor 'b' is float32[3]" in other_shape.text
    assert difference_of(ours, schema(b=(3,), c=(4,))) == "1 tensor only here, such as 'a'"
    assert difference_of(schema(b=(3,)), schema(a=(2,), b=(3,))) == "1 tensor only there, such as 'a'"
    wrapped = describe(["module.a"], [torch.zeros(2)], part_size_bytes=1024)
    assert difference_of(wrapped, schema(a=(2,))) is None
    unnamed = describe(["tensor_0"], [torch.zeros(2)], part_size_bytes=1024)
    assert "float32[3]" in str(difference_of(unnamed, schema(a=(3,))))


@pytest.mark.parametrize(
    ("at_caller", "words"), [("reached", "advertise 203.0.113.9:4222"), ("silent", "forward TCP port 4222")]
)
def test_a_nat_between_two_peers(at_caller: str, words: str) -> None:
    reply = probe_pb2.DialBackReply(outcome="not_yours", caller="203.0.113.9", at_caller=at_caller)
    found = judge_call_back(peer(), ("10.0.0.5:4222", True, reply))
    assert found.severity is Severity.FAILURE
    assert "a NAT is between" in found.text
    assert words in found.remedy


@pytest.mark.parametrize("listened", [True, False])
@pytest.mark.parametrize("outcome", [*DialOutcome, "later"])
def test_every_outcome_has_its_finding(outcome: str, listened: bool) -> None:
    reply = probe_pb2.DialBackReply(outcome=outcome, reason="why", seconds=0.1)
    found = judge_call_back(peer(), ("a.example:4222", listened, reply))
    fine = outcome == DialOutcome.REACHED or (outcome == DialOutcome.OTHER and not listened)
    assert (found.severity is Severity.OK) == fine
    assert bool(found.remedy) == (not fine)
