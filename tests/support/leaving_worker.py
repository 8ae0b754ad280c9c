"""A peer in a process of its own that trains until it gets a signal, and prints each round.

Run as `python -m tests.support.leaving_worker '{"strategy": "gradients", …}'`. It prints JSON lines: `ready`,
`round` for each receipt, and, if it handles SIGTERM itself, `handled` and `left` when it has ended its loop.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from typing import Any

import torch

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Receipt
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery
from averaging.discovery.gossip.record import GossipSettings
from averaging.transport import Transport
from tests.support.training import FOR_EVER, backward, batch_of, model_of


def report(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    handled: list[int] = []

    def note(number: int, _: object) -> None:
        handled.append(number)
        report("handled")

    if options.get("handles"):
        signal.signal(signal.SIGTERM, note)
    model = model_of(0)
    strategies = {"gradients": GradientAveraging(12), "diloco": DiLoCo(2), "local": LocalSGD(2)}

    def tell_round(receipt: Receipt) -> None:
        dropped = [str(each) for each in receipt.dropped]
        told = {"members": receipt.members, "outcome": receipt.outcome, "left": receipt.left, "dropped": dropped}
        report("round", **told)

    def discovery(endpoint: str, transport: Transport) -> GossipDiscovery:
        # Who waits for a peer that has gone waits without end: for a group, and until the peer's record expires.
        settings = GossipSettings(peer_lifetime=FOR_EVER)
        return GossipDiscovery("run", endpoint, transport, join=options.get("join", []), settings=settings)

    opt = DecentralizedAverager(
        partial(torch.optim.SGD, lr=0.01)(model.parameters()),
        model=model,
        run_id="run",
        discovery=discovery,
        strategy=strategies[options["strategy"]],
        group_wait=FOR_EVER,
        round_timeout=2 * FOR_EVER,
        on_round=tell_round,
        leave_on=options.get("leave_on", ["SIGTERM"]),
    )
    report("ready", endpoint=opt.endpoint)
    opt.wait_for_peers(options["peers"], 60.0)
    drawn = 0
    while not handled:
        drawn += 1
        backward(model, batch_of(drawn, 4))
        opt.step(batch_size=4)
    backward(model, batch_of(0, 4))
    opt.step(batch_size=4)
    finish = opt.finish()
    opt.close()
    report("left", steps=opt.local_step - drawn, finish=str(finish))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
