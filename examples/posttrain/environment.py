"""An environment of verifiers: the model is shown a digit and answers with the next one.

    averaging rollouts --environment examples.posttrain.environment --engine http://… --feed http://…

Half of the reward is for an answer that begins with the right digit, half for one that is nothing else, so that a model
that knows nothing yet has something to find.
"""

from collections.abc import Iterator

import verifiers.v1 as vf


class NextDigitData(vf.TaskData):
    """One digit.

    Attributes:
        answer: the digit after it, "0" after "9".
    """

    answer: str


class NextDigitTask(vf.Task[NextDigitData]):
    """The rubric."""

    @vf.reward(weight=0.5)
    async def begins_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply[:1] == self.data.answer)

    @vf.reward(weight=0.5)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class NextDigitConfig(vf.TasksetConfig):
    """The settings, which `--environment-args '{"taskset": {"digits": 5}}'` changes.

    Attributes:
        digits: how many digits there are, from 1 to 10.
    """

    digits: int = 10


class NextDigitTaskset(vf.Taskset[NextDigitTask, NextDigitConfig]):
    """One task for each digit."""

    def load(self) -> Iterator[NextDigitTask]:
        for digit in range(self.config.digits):
            data = NextDigitData(prompt=str(digit), answer=str((digit + 1) % self.config.digits))
            yield NextDigitTask(data, self.config.task)


__all__ = ["NextDigitTaskset"]
