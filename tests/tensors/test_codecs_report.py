"""The pure parts of the codecs' benchmark."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.codecs import errors, link_speeds, samples


def test_a_code_pays_up_to_where_it_takes_as_long_as_it_saves() -> None:
    serial, overlapped = link_speeds(4.0, 12.0, 1)
    assert serial == pytest.approx(0.75 * 3.0)
    assert overlapped == 4.0
    # a GB of float32 on that link: sent whole, or packed, sent as a quarter and unpacked
    assert 1 / serial == pytest.approx(1 / 4.0 + 0.25 / serial + 1 / 12.0)
    assert link_speeds(4.0, 12.0, 4) == (0.0, 0.0)


def test_errors_are_in_standard_deviations() -> None:
    values = torch.tensor([-10.0, 10.0, -10.0, 10.0])
    std = math.sqrt(400 / 3)
    largest, rms = errors(values, values + torch.tensor([0.0, 2.0, 0.0, 0.0]))
    assert largest == pytest.approx(2 / std)
    assert rms == pytest.approx(1 / std)


def test_one_sample_has_the_heavier_tail() -> None:
    found = samples(20_000)
    kurtosis = {name: float(((x - x.mean()) / x.std()).pow(4).mean()) for name, x in found.items()}
    assert 2.8 < kurtosis["gaussian"] < 3.2
    assert kurtosis["heavy-tailed"] > 10
