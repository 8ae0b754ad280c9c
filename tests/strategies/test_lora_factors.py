"""How the factors of LoRA layers travel: slots in a mean, what is chosen by bytes, and sums that round alike."""

import pytest
import torch

from averaging import ConfigError
from averaging.integrations.lora_factors import (
    FactorSlots,
    LayerShape,
    add_product,
    mean_of,
    packed,
    rest_of_factors,
    unpacked,
)

SHAPES = [LayerShape(out=6, into=4, rank=2), LayerShape(out=3, into=5, rank=1)]


def factors_of(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(shape.rank, shape.into, generator=generator),
            torch.randn(shape.out, shape.rank, generator=generator),
        )
        for shape in SHAPES
    ]


def slots_of(seed: int, slot: int) -> FactorSlots:
    slots = FactorSlots(sum(shape.factors for shape in SHAPES), 4, 32)
    slots.write(packed(factors_of(seed)), 0)
    slots.move(slot)
    return slots


def averaged(weights: dict[int, float], missing: tuple[int, int] | None = None) -> FactorSlots:
    """What a round gives to all members: the weighted mean of each piece. A member may be missing in one piece."""
    senders = {member: slots_of(member, member) for member in weights}
    result = slots_of(0, 0)
    for number, piece in enumerate(result.pieces):
        there = {member: weight for member, weight in weights.items() if (member, number) != missing}
        sums = [senders[member].pieces[number] * weight for member, weight in there.items()]
        piece.copy_(torch.stack(sums).sum(0) / sum(there.values()))
    return result


def test_the_mean_shows_the_factors_and_the_weight_of_every_member() -> None:
    weights = {0: 1.0, 1: 2.0, 3: 5.0}  # slot 2 is free
    slots = averaged(weights)
    assert len(slots.pieces) > 2
    read = slots.read()
    assert [share for share, _ in read] == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    for member, (_, values) in zip(weights, read, strict=True):
        for (a, b), (true_a, true_b) in zip(unpacked(values, SHAPES), factors_of(member), strict=True):
            torch.testing.assert_close(a, true_a)
            torch.testing.assert_close(b, true_b)


def test_a_member_that_one_reducer_has_dropped_does_not_count() -> None:
    read = averaged({0: 1.0, 1: 2.0, 3: 5.0}, missing=(1, 2)).read()
    assert [share for share, _ in read] == pytest.approx([1 / 6, 5 / 6])
    for member, (_, values) in zip((0, 3), read, strict=True):
        torch.testing.assert_close(values, packed(factors_of(member)))


def test_a_member_whose_values_cannot_be_told_from_its_share_does_not_count() -> None:
    slots = averaged({0: 1.0, 1: 1.0})
    slots.pieces[0][1, -1] = 1e-45  # what it has written there is not 1
    assert [share for share, _ in slots.read()] == [1.0]


def test_nobody_is_left_if_each_member_is_missing_somewhere() -> None:
    slots = averaged({0: 1.0, 1: 1.0})
    slots.pieces[0][0] = slots.pieces[1][1] = 0.0
    assert slots.read() == []


def test_factors_and_rest_are_the_mean_of_the_products() -> None:
    shares, scaling = [0.25, 0.75], 4.0
    members = [factors_of(1)[0], factors_of(2)[0]]
    new = mean_of(shares, [a for a, _ in members]), mean_of(shares, [b for _, b in members])
    mean = sum(share * scaling * (b.double() @ a.double()) for share, (a, b) in zip(shares, members, strict=True))
    left, right = rest_of_factors(shares, members, new, scaling)
    assert left.shape == (6, 3 * 2)
    torch.testing.assert_close(left @ right + scaling * new[1] @ new[0], torch.as_tensor(mean).float())


def test_a_product_is_summed_in_one_order_whatever_the_memory_looks_like() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(300, 7, generator=generator), torch.randn(7, 40, generator=generator)
    plain, turned = torch.zeros(300, 40), torch.zeros(40, 300).T
    add_product(plain, left, right)
    add_product(turned, left.T.contiguous().T, right)
    assert torch.equal(plain, turned)
    one_by_one = torch.zeros(300, 40)
    for column, row in zip(left.T, right, strict=True):
        one_by_one = one_by_one + column[:, None] * row
    assert torch.equal(plain, one_by_one)


def test_a_part_must_hold_an_element_of_each_peer() -> None:
    with pytest.raises(ConfigError, match="a part has no room for the factors of 8 peers"):
        FactorSlots(100, 8, 8)
