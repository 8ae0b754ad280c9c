"""Which members of a group differ, in what, and which of them are right."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from msgspec import msgpack

from averaging.common.safe_msgpack import unpack
from averaging.protocol.group import KEY, MAX_ENTRIES, Fingerprint, attach, detach
from averaging.receipts.drift import Drift, DriftCheck, DriftKind
from averaging.training.fingerprints import SAMPLE_BYTES, DriftMonitor, fingerprint_of, tolerance_of
from averaging.training.optimizer_state import GroupProgress
from averaging.training.site import Site

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
    assert str(drift) == f"{B} differs in 'layer2', all tensors by about {drift.size:.2g} of their size"


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


# Hyperparameters


def found(own: Mapping[str, str], *others: Mapping[str, str]) -> tuple[Drift, ...]:
    """What a peer finds at a common step; the others are on hosts of their own."""
    told = {name: Fingerprint(since=1, hyperparameters=one) for name, one in zip((B, C, D), others, strict=False)}
    return DriftCheck(Fingerprint(hyperparameters=own)).compare(A, told)


ADAM = {"lr": "0.1", "betas": "(0.9, 0.999)", "weight_decay": "0"}


def test_arguments_of_another_release_are_no_difference() -> None:
    assert found(ADAM, {**ADAM, "nesterov": "True"}) == ()


def monitor(**options: Any) -> tuple[torch.optim.Optimizer, DriftMonitor]:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(options.pop("groups", 1))]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], **options)
    return optimizer, DriftMonitor(Site(), optimizer, GroupProgress(optimizer))


def values_of(monitor: DriftMonitor) -> Mapping[str, str]:
    return monitor.comparison(None, 0).own.hyperparameters


def test_hyperparameters_are_told_as_text_that_rounding_does_not_change() -> None:
    _, usual = monitor(lr=0.1, betas=(0.9, 0.95))
    told = values_of(usual)
    assert (told["optimizer"], told["lr"], told["betas"], told["amsgrad"]) == ("AdamW", "0.1", "(0.9, 0.95)", "False")
    assert values_of(monitor(lr=0.1 + 1e-9, betas=(0.9, 0.95), groups=3)[1]) == told
    optimizer, several = monitor(groups=300)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 * number
    before = values_of(several)["lr"]
    optimizer.param_groups[-1]["lr"] = 7.0
    assert before != values_of(several)["lr"]
    assert len(before) < 64


def drifts_at(own_step: int, own_lr: float, their_step: int, their_lr: float) -> tuple[Drift, ...]:
    """What a peer finds of another one; both began with 0.1."""
    told: list[Fingerprint] = []
    for step, lr in ((own_step, own_lr), (their_step, their_lr)):
        optimizer, one = monitor(lr=0.1)
        optimizer.param_groups[0]["lr"] = lr
        told.append(replace(one.comparison(None, step).own, since=len(told)))
    return DriftCheck(told[0]).compare(A, {B: told[1]})


@pytest.mark.parametrize(
    ("own", "theirs", "drifts"),
    [
        ((5, 0.05), (5, 0.05), False),  # one schedule
        ((5, 0.05), (9, 0.03), False),
        ((9, 0.03), (5, 0.05), False),
        ((3, 0.1), (9, 0.03), False),  # the one that is behind is not there yet
        ((5, 0.05), (5, 0.1), True),  # another schedule
        ((5, 0.05), (9, 0.1), True),  # the one that is ahead should have changed it, too
    ],
)
def test_a_scheduled_value_is_compared_at_the_same_step(
    own: tuple[int, float], theirs: tuple[int, float], drifts: bool
) -> None:
    assert bool(drifts_at(*own, *theirs)) is drifts


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
        DriftCheck(Fingerprint(hyperparameters=ADAM)).compare(A, {B: fingerprint})
        DriftCheck(Fingerprint(fingerprint.moment), ["a"]).compare(A, {B: fingerprint})


def test_it_travels_beside_what_the_application_gathers() -> None:
    fingerprint = Fingerprint("m", "d", b"ab", 0.5, 1, 3, ADAM, ("lr",))
    for gather in (None, {"samples": 3}, 7, [1], {}):
        user = attach(gather, fingerprint)
        rest, read = detach(unpack(msgpack.encode(user)))
        assert rest == gather
        assert read == (fingerprint if gather is None or gather == {"samples": 3} else None)
    for sketch in (math.nan, math.inf, -math.inf):
        assert detach(attach(None, replace(fingerprint, sketch=sketch)))[1] is None
    large = fingerprint_of([torch.ones(3)] * 5000, "m" * 40, 1)
    assert len(msgpack.encode(attach(None, replace(large, hyperparameters=ADAM)))) < 4096
