"""Which members of a group differ, in what, and which of them are right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from averaging.common.safe_msgpack import unpack
from averaging.protocol.fingerprint import (
    KEY,
    MAX_ENTRIES,
    MAX_VALUES_BYTES,
    Fingerprint,
    Hyperparameters,
    attach,
    detach,
    digest_of,
    shorten,
)
from averaging.receipts.drift import Drift, DriftCheck, DriftKind, HyperparameterLog
from averaging.training.fingerprints import SAMPLE_BYTES, fingerprint_of, tolerance_of

A, B, C, D = (f"10.0.0.{number}:5001" for number in range(1, 5))


def model(count: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{place}": torch.randn(9, 7, generator=generator).to(dtype) for place in range(count)}


def compare(models: Mapping[str, dict[str, torch.Tensor]], **since: int) -> list[tuple[Drift, ...]]:
    """What each of these peers finds."""
    told = {
        name: fingerprint_of(list(tensors.values()), "5-ab", 5, since.get(f"s{place}", 0))
        for place, (name, tensors) in enumerate(models.items())
    }
    return [
        DriftCheck(told[name], list(tensors), tolerance=tolerance_of(list(tensors.values()))).compare(
            name, {other: one for other, one in told.items() if other != name}
        )
        for name, tensors in models.items()
    ]


def test_equal_members_are_not_named() -> None:
    assert compare({A: model(), B: model(), C: model()}) == [()] * 3


def test_all_members_name_the_one_that_differs_and_its_first_tensor() -> None:
    other = model()
    other["layer2"][3, 3] += 1.0
    other["layer3"] *= 2.0
    found = compare({A: model(), B: other, C: model()})
    assert found[0] == found[1] == found[2]
    ((drift,),) = {tuple(one) for one in found}
    assert (drift.endpoint, drift.kind, drift.name) == (B, DriftKind.TENSOR, "'layer2'")
    assert drift.size is not None
    assert 0.01 < drift.size < 1.0
    assert str(drift) == f"{B} differs in 'layer2' by about {drift.size:.2g} of its size"


def test_of_two_the_one_that_has_trained_longer_is_right() -> None:
    assert {one.endpoint for found in compare({A: model(), B: model(seed=1)}, s0=7) for one in found} == {A}
    assert {one.endpoint for found in compare({A: model(), B: model(seed=1)}, s1=7) for one in found} == {B}


def test_members_of_another_moment_are_not_compared() -> None:
    values = list(model().values())
    own, other = fingerprint_of(values, "5-ab", 5), fingerprint_of(list(model(seed=1).values()), "4-ab", 5)
    assert DriftCheck(own, list(model())).compare(A, {B: other}) == ()


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-7), (torch.float64, 1e-9), (torch.bfloat16, 1e-3)])
def test_differences_by_rounding_are_told_apart(dtype: torch.dtype, noise: float) -> None:
    other = {
        name: (tensor.to(torch.float64) * (1 + noise * torch.randn(tensor.shape, dtype=torch.float64))).to(dtype)
        for name, tensor in model(dtype=dtype).items()
    }
    ((drift,), _) = compare({A: model(dtype=dtype), B: other})
    assert drift.kind is DriftKind.ROUNDING
    assert "as machines round differently" in str(drift)


def test_a_single_element_is_found_and_not_taken_for_rounding() -> None:
    one, other = {"a": torch.zeros(100_000) + 1}, {"a": torch.zeros(100_000) + 1}
    other["a"][77_777] += 1e-3
    ((drift,), _) = compare({A: one, B: other})
    assert (drift.kind, drift.name, drift.size) == (DriftKind.TENSOR, "'a'", None)


def test_a_tensor_of_a_model_with_thousands_is_narrowed_down() -> None:
    count = 2 * MAX_ENTRIES + 10
    one, other = ({f"t{place}": torch.full((2,), float(place)) for place in range(count)} for _ in range(2))
    other["t777"] += 1
    ((drift,), _) = compare({A: one, B: other})
    assert drift.name.startswith("a tensor from 't77")
    assert "'t777'" in drift.name


def test_of_a_large_model_a_part_of_each_tensor_is_digested_and_the_part_moves_on() -> None:
    tensors = [torch.zeros(SAMPLE_BYTES // 4), torch.zeros(SAMPLE_BYTES // 4), torch.zeros(3)]
    numbers = range(3)
    before = [fingerprint_of(tensors, "", number).digest for number in numbers]
    tensors[1][-1] = 1.0
    after = [fingerprint_of(tensors, "", number).digest for number in numbers]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False]
    tensors[2] += 1.0
    assert all(fingerprint_of(tensors, "", number).digest != after[number] for number in numbers)


def test_layouts_and_views_do_not_matter() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    laid_out = tensor.to(memory_format=torch.channels_last)
    assert fingerprint_of([tensor], "", 1) == fingerprint_of([laid_out], "", 1)
    assert fingerprint_of([torch.empty(0), tensor], "", 1).sketch(0) == 0.0


# Hyperparameters


def told(values: Hyperparameters, step: int = 0, since: int = 0) -> Fingerprint:
    return Fingerprint(since=since, step=step, hyperparameters=shorten(values))


def log_of(values: Sequence[Hyperparameters], first: int = 0) -> HyperparameterLog:
    log = HyperparameterLog()
    for step, one in enumerate(values, first):
        log.record(step, one)
    return log


def found(own: Hyperparameters, *others: Hyperparameters) -> tuple[Drift, ...]:
    """What a peer finds at a common step; the others are on hosts of their own."""
    check = DriftCheck(told(own), log=log_of([own]))
    return check.compare(A, {name: told(one, since=1) for name, one in zip((B, C, D), others, strict=False)})


ADAM: Hyperparameters = {"lr": (0.1,), "betas": ((0.9, 0.999),), "weight_decay": (0.0,)}


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"lr": (0.2,)}, "has lr = 0.2, the others 0.1"),
        ({"lr": (0.1, 0.3)}, "has lr of group 1 = 0.3, the others 0.1"),
        ({"betas": ((0.9, 0.95),)}, "has betas = (0.9, 0.95), the others (0.9, 0.999)"),
        ({"weight_decay": (1e-3,)}, "has weight_decay = 0.001, the others 0.0"),
        ({"weight_decay": (None,)}, "has weight_decay = None, the others 0.0"),
        ({"betas": (0.9,), "weight_decay": (1.0,)}, "has betas = 0.9, the others (0.9, 0.999)"),
    ],
)
def test_the_first_hyperparameter_that_differs_is_named(theirs: Hyperparameters, text: str) -> None:
    (drift,) = found(ADAM, {**ADAM, **theirs}, ADAM)
    assert str(drift) == f"{B} {text}"


@pytest.mark.parametrize("theirs", [{"lr": (0.1 + 1e-9,)}, {"nesterov": (True,)}, {"lr": (0.1, 0.1)}])
def test_rounding_of_a_schedule_and_arguments_of_another_release_are_no_difference(theirs: Hyperparameters) -> None:
    assert found(ADAM, {**ADAM, **theirs}) == ()


def test_the_peer_that_differs_from_most_names_itself() -> None:
    other = {**ADAM, "lr": (0.2,)}
    check = DriftCheck(told(ADAM), log=log_of([ADAM]))
    drifts = check.compare(A, {B: told(other), C: told(other)})
    assert [str(one) for one in drifts] == [f"{A} has lr = 0.1, the others 0.2"]


def test_many_groups_are_compared_by_digest() -> None:
    many = {**ADAM, "lr": tuple(0.1 * number for number in range(300))}
    short = shorten(many)
    assert len(msgpack.encode({name: list(column) for name, column in short.items()})) < MAX_VALUES_BYTES
    assert short["lr"] == digest_of(many["lr"])
    assert found(many, many) == ()
    (drift,) = found(many, {**many, "lr": (*many["lr"][:-1], 7.0)})
    assert drift.name == "lr"


def schedule(step: int) -> Hyperparameters:
    return {**ADAM, "lr": (0.1 / (1 + step // 5),)}


def test_peers_of_unequal_speed_are_compared_at_the_same_step() -> None:
    """A dumb reference: every pair of steps, with the same and with another schedule."""
    for slow, fast in ((3, 17), (17, 3), (9, 9), (0, 40)):
        own = log_of([schedule(step) for step in range(slow + 1)])
        check = DriftCheck(told(schedule(slow), slow), log=own)
        assert check.compare(A, {B: told(schedule(fast), fast)}) == ()
        for step in range(slow + 1, fast + 1):
            own.record(step, schedule(step))
            check.own = told(schedule(step), step)
            assert check.compare(A, {B: told(schedule(fast + step), fast + step)}) == ()


@pytest.mark.parametrize("ahead", [0, 3, 30, 100_000])
def test_another_schedule_is_found_also_at_a_peer_that_is_ahead(ahead: int) -> None:
    own = HyperparameterLog()
    seen: tuple[Drift, ...] = ()
    for step in range(100):
        own.record(step, schedule(step))
        theirs = {**schedule(step + ahead), "lr": (0.5,)}
        check = DriftCheck(told(schedule(step), step), log=own)
        seen += check.compare(A, {B: told(theirs, step + ahead, since=1)})
    assert bool(seen) is (ahead < 100)
    assert all(one.name == "lr" for one in seen)


def test_a_log_begins_anew_after_a_gap() -> None:
    log = log_of([schedule(step) for step in range(10)])
    assert (log.at(3), log.at(9), log.at(10)) == (schedule(3), schedule(9), None)
    log.record(50, ADAM)
    assert (log.at(3), log.at(49), log.at(50)) == (None, None, ADAM)
    log.record(20, ADAM)
    assert (log.at(20), log.at(50)) == (ADAM, None)


def test_all_members_decide_alike_whoever_differs() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        count = rng.randrange(2, 6)
        names = [f"10.0.{rng.randrange(3)}.1:{port}" for port in range(count)]
        models = {name: model(seed=rng.randrange(2)) for name in names}
        results = compare(models, **{f"s{place}": rng.randrange(3) for place in range(count)})
        assert len(set(results)) == 1, seed


# On the wire


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
        max_leaves=30,
    )
)
def test_what_a_stranger_sends_is_read_or_ignored(packed: object) -> None:
    _, fingerprint = detach({KEY: packed})
    if fingerprint is not None:
        DriftCheck(told(ADAM), log=log_of([ADAM])).compare(A, {B: fingerprint})
        DriftCheck(replace(told(ADAM), moment=fingerprint.moment), ["a"]).compare(A, {B: fingerprint})


def test_it_travels_beside_what_the_application_gathers() -> None:
    fingerprint = replace(told(ADAM, 3, 1), moment="m", digest="d", entries=b"ab", sketches=bytes(8))
    for gather in (None, {"samples": 3}, 7, [1], {}):
        user = attach(gather, fingerprint)
        rest, read = detach(unpack(msgpack.encode(user)))
        assert rest == gather
        assert read == (fingerprint if gather is None or gather == {"samples": 3} else None)
    large = fingerprint_of([torch.ones(3)] * 5000, "m" * 40, 1)
    assert len(msgpack.encode(attach(None, replace(large, hyperparameters=shorten(ADAM))))) < 4096
