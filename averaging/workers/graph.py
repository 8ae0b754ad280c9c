"""The graph of model function calls, and its levels. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from averaging.errors import ConfigError
from averaging.workers.hooks import Hook


class Interface(StrEnum):
    """What a call does with its model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"


class OnLost(StrEnum):
    """What happens if a worker dies during a call."""

    ERROR = "error"
    """The step ends with an error. The samples stay in the buffer of the master."""
    REASSIGN = "reassign"
    """Another data-parallel rank of the model gets the samples."""


@dataclass(frozen=True)
class Call:
    """A model function call (MFC): one model computes new tensors of samples, or trains on them.

    Attributes:
        name: For example `actor_gen`.
        model: Name of the model.
        interface: `generate`, `inference` or `train_step`.
        inputs: Names of the tensors that it gets.
        outputs: Names of the tensors that it returns; none for `train_step`.
        post_hooks: Hooks after it, in order.
        after: Names of calls that must be complete before, although this one gets no tensor of theirs.
        on_lost: By default `error` for `train_step`, whose ranks exchange gradients, and `reassign` for the others.

    Raises:
        ConfigError: The interface is unknown, or a call has no inputs.
    """

    name: str
    model: str
    interface: Interface | str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    post_hooks: tuple[Hook, ...] = ()
    after: tuple[str, ...] = ()
    on_lost: OnLost | str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("interface", Interface), ("on_lost", OnLost)):
            value = getattr(self, name)
            if value is not None and value not in list(kind):
                raise ConfigError(f"{name} of call {self.name!r} must be one of {', '.join(kind)}, not {value!r}")
        if not self.inputs:
            raise ConfigError(f"call {self.name!r} has no inputs; name the tensors that it gets")

    @property
    def reassigns(self) -> bool:
        """Whether another data-parallel rank gets the samples of a lost one."""
        return (self.on_lost or (OnLost.ERROR if self.interface == Interface.TRAIN_STEP else OnLost.REASSIGN)) == (
            OnLost.REASSIGN
        )


class Levels:
    """The levels of a graph: the calls of one level depend only on those of earlier levels.

    Args:
        calls: In any order.
        data_keys: Names of the tensors that the dataset has.

    Attributes:
        calls: The levels in order; within a level in the order of the names.

    Raises:
        ConfigError: There is a cycle, a tensor that nothing makes or that two calls make, or an unknown call.
    """

    def __init__(self, calls: Sequence[Call], data_keys: Sequence[str]) -> None:
        if not calls:
            raise ConfigError("the plan has no calls")
        by_name = {call.name: call for call in calls}
        makers: dict[str, str] = {}
        for call in calls:
            for key in call.outputs:
                if key in data_keys or key in makers:
                    raise ConfigError(
                        f"{key!r} is an output of {call.name!r} and of {makers.get(key, 'the dataset')}; rename one"
                    )
                makers[key] = call.name
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for call in calls:
            for key in call.inputs:
                if key not in makers and key not in data_keys:
                    raise ConfigError(f"{key!r}, an input of {call.name!r}, is made by no call and not in the dataset")
            for name in call.after:
                if name not in by_name:
                    raise ConfigError(f"{call.name!r} is to run after the unknown call {name!r}")
            sorter.add(call.name, *call.after, *(makers[key] for key in call.inputs if key in makers))
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = error.args[1]  # each is needed by the next
            raise ConfigError(f"the calls depend on each other in a cycle: {' → '.join(cycle)}") from None
        self.calls: list[list[Call]] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            self.calls.append([by_name[name] for name in ready])
            sorter.done(*ready)
