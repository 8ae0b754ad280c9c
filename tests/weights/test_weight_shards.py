"""Parts of tensors are put together as a dumb reference does, whatever the layout."""

from dataclasses import replace

import torch
from hypothesis import given, strategies as st

from averaging.weights.layout import WeightLayout, WeightSpec, layout_for
from averaging.weights.parts import (
    box_of,
    is_wanted,
    missing_part,
    put_together,
    whole_of,
    write_part,
)
from averaging.weights.snapshot import seal, view_state, view_tensors


def rows(name: str, shape: tuple[int, ...], parts: int) -> list[WeightSpec]:
    """As FSDP2 divides: like torch.chunk, and later ranks hold nothing."""
    specs, first = [], 0
    for part in range(parts):
        size = -(-shape[0] // parts)
        count = max(0, min(size, shape[0] - part * size))
        specs.append(WeightSpec(name, "float32", (count, *shape[1:]), shape, (first, *[0] * (len(shape) - 1))))
        first += count
    return specs


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 5), st.integers(1, 5))
def test_any_parts_make_the_parts_of_any_other_division(shape: tuple[int, ...], there: int, here: int) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    sent = rows("w", shape, there)
    for own in rows("w", shape, here):
        assert missing_part([own], [WeightLayout((spec,)) for spec in sent]) is None
        target = torch.full(own.shape, -1.0)
        for spec in sent:
            part = whole[tuple(slice(start, stop) for start, stop in box_of(spec))]
            if is_wanted([own], WeightLayout((spec,))):
                write_part(target, own, part, spec)
        assert torch.equal(target, whole[tuple(slice(start, stop) for start, stop in box_of(own))])


@given(SHAPES, st.integers(1, 5))
def test_whole_tensors_are_cut_into_parts_and_put_together(shape: tuple[int, ...], parts: int) -> None:
    state = {"w": torch.arange(float(torch.Size(shape).numel())).reshape(shape), "n": torch.tensor(3)}
    whole = seal(view_state(state), 1, None)
    found: list[tuple[WeightSpec, torch.Tensor]] = []
    for number, spec in enumerate(rows("w", shape, parts)):
        one = state["w"][tuple(slice(start, stop) for start, stop in box_of(spec))]
        specs, tensors = [spec], {"w": one.contiguous()}
        if number == 0:
            specs.append(WeightSpec("n", "int64", ()))
            tensors["n"] = state["n"]
        # What the rank of this part would publish.
        published = seal(view_tensors(layout_for(specs), [tensors[spec.name] for spec in specs]), 1, None)
        part = whole.arranged(published.manifest.layout)
        assert part.manifest == published.manifest
        assert all(torch.equal(ours, tensors[spec.name]) for spec, ours in part.parts())
        found.extend(part.parts())
    together = put_together(found)
    assert together.keys() == state.keys()
    assert all(torch.equal(together[name], state[name]) for name in state)


def test_parts_of_another_tensor_are_not_cut() -> None:
    whole = seal(view_state({"w": torch.zeros(4, 2)}), 1, None)
    for spec in (*rows("w", (5, 2), 2), *rows("v", (4, 2), 2), replace(rows("w", (4, 2), 2)[0], dtype="float16")):
        assert whole.arranged(WeightLayout((spec,))) is whole


def test_missing_doubled_and_strange_parts_are_named() -> None:
    first, second = rows("w", (4, 2), 2)
    own = [whole_of(first)]
    assert missing_part(own, [WeightLayout((first, second))]) is None
    assert (
        missing_part(own, [WeightLayout((first,)), WeightLayout((first, second))]) is None
    )  # the same part twice is one
    assert "not all" in (missing_part(own, [WeightLayout((first,))]) or "")
    overlapping = replace(second, shape=(3, 2), offset=(1, 0))
    assert "twice" in (missing_part(own, [WeightLayout((first, second, overlapping))]) or "")
    other = replace(second, whole=(5, 2))
    assert "[4, 2] here and float32[5, 2] there" in (missing_part(own, [WeightLayout((first, other))]) or "")
    extra = WeightSpec("v", "float32", (1,))
    assert "'v' (float32[1]) is only there" in (missing_part(own, [WeightLayout((first, second, extra))]) or "")
    assert "not all" in (missing_part([*own, extra], [WeightLayout((first, second))]) or "")
    scalar = WeightSpec("n", "int64", ())
    assert missing_part([scalar], [WeightLayout((scalar,))]) is None
