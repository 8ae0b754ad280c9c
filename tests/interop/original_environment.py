"""An environment on atroposlib's BaseEnv: `python original_environment.py URL TOKENIZER STEPS GROUP_SIZE [FRACTION]`.

It makes its rollouts up, so that it needs no model. BaseEnv makes all requests to the feed.
"""

import asyncio
import random
import sys
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig


class Guesses(BaseEnv):  # type: ignore[misc]
    name = "guesses"

    async def setup(self) -> None:
        self.number = 0

    async def get_next_item(self) -> int:
        self.number += 1
        return self.number

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        size = self.config.group_size
        tokens = [[1, 3 + item % 60, *(random.randrange(3, 64) for _ in range(100))] for _ in range(size)]
        return {
            "tokens": tokens,
            "masks": [[-100, -100, *sequence[2:]] for sequence in tokens],
            "scores": [float(number) for number in range(size)],
            "inference_logprobs": [[1.0, 1.0, *(-random.random() for _ in sequence[2:])] for sequence in tokens],
        }, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


def main(url: str, tokenizer: str, steps: str, group_size: str, fraction: str = "") -> None:
    config = BaseEnvConfig(
        tokenizer_name=tokenizer,
        rollout_server_url=url,
        use_wandb=False,
        wandb_name="guesses",
        total_steps=int(steps),
        group_size=int(group_size),
        max_num_workers=4,
        min_batch_allocation=float(fraction) if fraction else None,
        steps_per_eval=0,
    )
    server = APIServerConfig(model_name="none", base_url="http://127.0.0.1:9", api_key="x", health_check=False)
    asyncio.run(Guesses(config, [server]).env_manager())
    print("the environment has ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
