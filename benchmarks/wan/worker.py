"""One peer in the WAN benchmark: `benchmarks.allreduce.worker`, at a given address and with a stated bandwidth."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import torch

from benchmarks.allreduce.systems import Averaging, Gloo
from benchmarks.allreduce.worker import work
from benchmarks.wan.raw import Raw


def make(options: argparse.Namespace) -> Any:
    """Creates the `System` with that name."""
    match options.system:
        case "averaging":
            listen = f"{options.hosts[options.rank]}:0"
            return Averaging(
                options, listen=listen, insecure=True, bandwidth=options.bandwidth
            )  # no TLS in Gloo either
        case "gloo":
            return Gloo(options)
        case _:
            return Raw(options, options.hosts, options.parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=["averaging", "gloo", "raw"])
    for name in ("rank", "peers", "mib"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tensors", default="4")
    parser.add_argument("--codec", required=True)
    parser.add_argument("--join", default="", help="address of rank 0; for Gloo the URL of a file")
    parser.add_argument("--hosts", nargs="+", required=True, help="of all peers, in the order of their ranks")
    parser.add_argument("--bandwidth", type=float, help="that this peer states, in bytes/s")
    parser.add_argument("--parts", nargs="+", type=float, help="of the bytes that each peer reduces, for raw")
    options = parser.parse_args()
    options.kib = 1024 * options.mib  # what the systems read
    torch.set_num_threads(1)
    # Only answers may be on stdout; libraries may print there, too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(work(make(options), options, out))


if __name__ == "__main__":
    main()
