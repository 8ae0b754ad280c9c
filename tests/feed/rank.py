"""One rank of a feed: `python -m tests.feed.rank JSON` prints a batch for each "next" on its stdin."""

import datetime
import json
import sys
from typing import Any

import torch.distributed as dist

from averaging.errors import AveragingError
from averaging.rl.feed import BatchFeed, Registration


def emit(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main(arguments: dict[str, Any]) -> None:
    if arguments["ranks"] > 1:
        where, wait = f"file://{arguments['store']}", datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", where, wait, rank=arguments["rank"], world_size=arguments["ranks"])
    group = dist.new_group(arguments["members"]) if arguments["members"] else None
    if arguments["members"] and arguments["rank"] not in arguments["members"]:
        emit(event="up")
        sys.stdin.readline()
        return
    feed = BatchFeed(arguments["url"], Registration(**arguments["registration"]), group, **arguments["options"])
    emit(event="up")
    for line in sys.stdin:  # one batch for each
        command, _, argument = line.strip().partition(" ")
        if command == "saved":
            feed.saved(int(argument))
            continue
        if command == "leave":
            break
        if command == "close":
            feed.close()
            emit(event="closed")
            continue
        try:
            batch = next(feed)
        except StopIteration:
            emit(event="end", step=feed.step)
        except AveragingError as error:
            emit(event="failed", kind=type(error).__name__, message=str(error))
        else:
            emit(event="batch", step=batch.step, groups=batch.groups, sequences=batch.sequences)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
