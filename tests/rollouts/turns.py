"""An environment of several turns: whoever answers is told to go on, and is scored by the last answer."""

from collections.abc import Iterator

import verifiers.v1 as vf


class CountingData(vf.TaskData):
    begin: int


class CountingTask(vf.Task[CountingData]):
    pass


class CountingConfig(vf.TasksetConfig):
    tasks: int = 3


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):
    def load(self) -> Iterator[CountingTask]:
        for begin in range(self.config.tasks):
            data = CountingData(begin=begin, prompt=str(begin), system_prompt="yes")
            yield CountingTask(data, self.config.task)


class CountingEnvConfig(vf.EnvConfig):
    counter: vf.AgentConfig = vf.AgentConfig()
    turns: int = 3


class CountingEnv(vf.Env[CountingEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.counter.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(self.config.turns - 1):
                if segment.terminated:
                    break
                segment = await interaction.turn(segment.last_reply)
        wanted = str((task.data.begin + self.config.turns) % 10)
        interaction.trace.record_reward("counted", float(segment.last_reply == wanted))


__all__ = ["CountingEnv", "CountingTaskset"]
