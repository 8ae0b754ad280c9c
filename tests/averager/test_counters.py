"""Integer buffers take the largest value among the members of a round."""

from typing import Any

import pytest
import torch
from msgspec import msgpack

from averaging.training.named_tensors import KEY, MAX_EACH, Counters


def counts(*values: int) -> dict[str, torch.Tensor]:
    return {"buffer/a": torch.tensor(values[0]), "buffer/b": torch.tensor(values[1:], dtype=torch.int32)}


def sent_by(names: dict[str, torch.Tensor], *values: Any) -> list[Any]:
    return [Counters(names).added_to(None)[KEY][0], *values]


def test_counters_in_another_order_are_paired_by_name() -> None:
    other = dict(reversed(counts(3, 900).items()))
    for own, sent in ((counts(5, 7), other), (other, counts(5, 7))):
        Counters(own).take_largest([Counters(own).added_to(None), Counters(sent).added_to(None)])
        assert (own["buffer/a"].item(), own["buffer/b"].tolist()) == (5, [900])


@pytest.mark.parametrize(
    "values",
    [
        *(None, [], Counters({"buffer/a": torch.tensor(8), "buffer/c": torch.tensor([9])}).added_to({})[KEY]),
        *(sent_by(counts(1, 2), *one) for one in ([1], [9, 9, 9], [9, None], [9, 9.5], [9, True], [9, 2**53 + 1])),
    ],
)
def test_values_of_other_counters_and_implausible_ones_are_ignored(values: Any) -> None:
    own = counts(1, 2)
    Counters(own).take_largest([{KEY: values}, None, "text", {KEY: sent_by(own, 7, 1)}])
    assert (own["buffer/a"].item(), own["buffer/b"].tolist()) == (7, [2])


def test_a_value_that_does_not_fit_becomes_the_largest_that_does() -> None:
    own = {"buffer/a": torch.tensor(1, dtype=torch.int16)}
    Counters(own).take_largest([{KEY: sent_by(own, 2**40)}])
    assert own["buffer/a"].item() == 2**15 - 1


def test_tables_masks_and_bytes_are_no_counters() -> None:
    others = {
        "buffer/table": torch.zeros(MAX_EACH + 1, dtype=torch.int64),
        "buffer/mask": torch.zeros(2, dtype=torch.bool),
        "buffer/bytes": torch.zeros(2, dtype=torch.uint8),
    }
    assert not Counters(others)
    many = {f"buffer/{n}": torch.zeros(MAX_EACH, dtype=torch.int64) for n in range(9)}
    assert len(msgpack.encode(Counters(many | others).added_to(None))) < 20_000
