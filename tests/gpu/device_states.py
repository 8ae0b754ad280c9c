"""The state that a peer shares, of tensors on a device: what newcomers get is what was committed."""

import torch

from averaging.state.manifest import ExtraState, Snapshots
from averaging.tensors import SharedTensors


async def check_committed_states(put_on: torch.device, count: int) -> None:
    """Commits, and writes right after; then again while a reader holds the state before, and while nobody does."""
    weight, moment = (torch.zeros(count).to(put_on) for _ in range(2))
    shared = SharedTensors({"w": weight})
    snapshots = Snapshots(shared, lambda: ExtraState({"moment": moment}, {}), shared=True)

    def write(value: float) -> None:
        with shared.locked():
            weight.fill_(value)
            moment.fill_(10 * value)

    def commit(version: int) -> None:
        with shared.locked(keep=False):
            snapshots.commit(version)

    def values(state: object) -> list[set[float]]:
        return [set(tensor.tolist()) for tensor in state.tensors.values()]  # type: ignore[attr-defined]

    commit(0)
    write(1.0)
    commit(1)
    write(2.0)  # copies what was committed
    held = (await snapshots.latest(10.0)).state
    assert values(held) == [{1.0}, {10.0}]
    commit(2)
    write(3.0)
    second = (await snapshots.latest(10.0)).state
    assert values(second) == [{2.0}, {20.0}]
    assert values(held) == [{1.0}, {10.0}], "the memory of a state that is read was used again"
    del held, second
    places = set()
    for version in range(3, 9):  # a thread that has copied a state may hold it a moment longer
        commit(version)
        state = (await snapshots.latest(10.0)).state  # the reader makes the copy
        write(version + 1.0)
        assert values(state) == [{float(version)}, {10.0 * version}]
        places.add(state.tensors["w"].data_ptr())
        del state
    assert len(places) < 6
