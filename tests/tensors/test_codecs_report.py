"""The pure parts of the codecs' benchmark."""

from __future__ import annotations

import math

import pytest
import torch

from averaging.protocol import TopK
from benchmarks.codecs import (
    SPARSE_HEADER,
    errors,
    link_speeds,
    replies,
    samples,
    seconds_of_a_billion,
    sparse_rows,
    sparse_speeds,
)


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


def test_a_round_of_a_billion_parameters_takes_all_steps_of_a_member() -> None:
    top_k = {"encode_gb_per_s": 0.5, "decode_gb_per_s": 20.0, "write_back_gb_per_s": 8.0}
    reply = {"reduce_gb_per_s": 0.25, "decode_gb_per_s": 2.0}
    assert seconds_of_a_billion(top_k, reply, 8) == pytest.approx(4 / 0.5 + 4 / 20 + 4 / 8 + 4 / 2 + 4 / 8 / 0.25)


def test_the_speeds_of_top_k_are_measured_and_shown() -> None:
    found = sparse_speeds(TopK(1 / 64, 2), mib=1, passes=1, groups=[2])
    assert found["bits_a_weight"] == pytest.approx(0.21875, rel=0.01)
    assert found["replies"]["2"]["bits_a_weight"] == pytest.approx(2 * 0.21875, rel=0.01)  # as they came
    assert all(reply["seconds_of_a_billion"] > 0 for reply in found["replies"].values())
    [row] = sparse_rows([found])
    assert [row[place] for place in (0, 1, 2, 5)] == ["1/64", "2", "0.219", "2"]
    assert len(row) == len(SPARSE_HEADER)


def test_a_reply_holds_the_contributions_of_all_members() -> None:
    sent, reply = replies(TopK(1 / 64, 2), members=3, blocks=2)
    assert len(sent) == 3
    assert set(reply.part.indices.tolist()) == {index for one in sent for index in one.part.indices.tolist()}
