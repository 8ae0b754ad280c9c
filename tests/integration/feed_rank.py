"""One rank of a feed: `python -m tests.integration.feed_rank JSON` tells a batch for each "next" on its stdin."""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

import torch.distributed as dist

from averaging.errors import AveragingError
from averaging.feed import BatchFeed, Registration


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main(told: dict[str, Any]) -> None:
    if told["ranks"] > 1:
        where, wait = f"file://{told['store']}", datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", where, wait, rank=told["rank"], world_size=told["ranks"])
    group = dist.new_group(told["members"]) if told["members"] else None
    if told["members"] and told["rank"] not in told["members"]:
        tell(event="up")
        sys.stdin.readline()
        return
    feed = BatchFeed(told["url"], Registration(**told["registration"]), group, **told["options"])
    tell(event="up")
    for line in sys.stdin:  # one batch for each
        command, _, argument = line.strip().partition(" ")
        if command == "saved":
            feed.saved(int(argument))
            continue
        if command == "leave":
            break
        if command == "close":
            feed.close()
            tell(event="closed")
            continue
        try:
            batch = next(feed)
        except StopIteration:
            tell(event="end", step=feed.step)
        except AveragingError as error:
            tell(event="failed", kind=type(error).__name__, message=str(error))
        else:
            tell(event="batch", step=batch.step, groups=batch.groups, sequences=batch.sequences)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
