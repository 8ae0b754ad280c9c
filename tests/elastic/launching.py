"""`elastic_launch` with our rendezvous, in a program of its own, as in the documentation of torch."""

from __future__ import annotations

import json
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.elastic.worker import train


def main() -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="launched",
        rdzv_backend="averaging",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    print(json.dumps({"event": "returned", "values": elastic_launch(config, train)(sys.argv[1], 3, 0.0)}), flush=True)


if __name__ == "__main__":
    main()
