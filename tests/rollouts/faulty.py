"""An environment whose rubric fails for some digits, or gives no reward."""

from collections.abc import Iterator

import verifiers.v1 as vf


class FaultyTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.prompt == "1":
            raise RuntimeError("the rubric has a fault")
        return float("nan") if self.data.prompt == "2" else 1.0


class FaultyConfig(vf.TasksetConfig):
    digits: str = "0123"


class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):
    def load(self) -> Iterator[FaultyTask]:
        for digit in self.config.digits:
            yield FaultyTask(vf.TaskData(prompt=digit), self.config.task)


__all__ = ["FaultyTaskset"]
