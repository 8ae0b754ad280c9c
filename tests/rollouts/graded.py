"""An environment whose grader is away for its first rollouts, and then gives all the same score."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

rollouts = itertools.count(1)


class GradedTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if next(rollouts) <= 60:
            raise ConnectionError("the grader does not answer")
        return 1.0


class GradedTaskset(vf.Taskset[GradedTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GradedTask]:
        for digit in "0123456789":
            yield GradedTask(vf.TaskData(prompt=digit), self.config.task)


__all__ = ["GradedTaskset"]
