"""Scalars of receipts and of the averager's status, for logs and plots."""

from __future__ import annotations

from averaging import DecentralizedAverager, Receipt


def round_scalars(receipt: Receipt) -> dict[str, float]:
    """Returns the numbers of one round: seconds, bytes, members, elements."""
    straggler = receipt.straggler
    return {
        "round/averaged": float(receipt.averaged),
        "round/seconds": receipt.seconds,
        **{f"round/seconds/{phase}": seconds for phase, seconds in receipt.phases.items()},
        "round/bytes_sent": receipt.bytes_sent,
        "round/bytes_received": receipt.bytes_received,
        "round/members": len(receipt.members),
        "round/dropped": len(receipt.dropped),
        "round/kept_local": receipt.kept_local,
        "round/straggler_seconds": 0.0 if straggler is None else straggler.seconds,
    }


def status_scalars(averager: DecentralizedAverager) -> dict[str, float]:
    """Returns the progress of the averager and its run; `global_step` only if the strategy has global steps.

    Raises:
        ClosedError: the averager was closed.
    """
    status = averager.status
    global_step = {} if status.global_step is None else {"averaging/global_step": status.global_step}
    return {
        "averaging/local_step": status.local_step,
        **global_step,
        "averaging/samples": status.samples,
        "averaging/peers": len(status.peers),
        "averaging/rounds": status.peer.rounds,
    }
