"""What torchrun's agent does beside the rendezvous: it counts restarts, and shows a refusal as a traceback.

torch has no interface for either, so this module reads a private attribute and replaces `sys.excepthook`. If another
torch has neither, restarts are counted as torch does, and refusals look as they did.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousError

from averaging.errors import AveragingError

logger = logging.getLogger("averaging.elastic")

TORCHRUN = Path(torch.distributed.__file__).with_name("run.py")

_RESTARTS_LEFT = "_remaining_restarts"


class RestartBudget:
    """Gives an agent back the restart that the loss of another node has cost it.

    The workers of a node fail when those of another node are gone, and torch counts that as their own failure.

    Attributes:
        left: restarts after the last rendezvous; None if it is not known.
    """

    def __init__(self) -> None:
        self.left: int | None = None

    def settle(self, lost: bool) -> bool:
        """Call it at the end of a rendezvous, from the agent's thread.

        Args:
            lost: whether a node of the round before is not in this one.

        Returns:
            Whether a restart was given back.
        """
        agent = _calling_agent()
        left = getattr(agent, _RESTARTS_LEFT, None)
        if not isinstance(left, int):
            return False
        give_back = lost and self.left is not None and left < self.left
        if give_back:
            setattr(agent, _RESTARTS_LEFT, self.left)
        else:
            self.left = left
        return give_back


def _calling_agent() -> SimpleElasticAgent | None:
    """The agent that has called this thread's function, directly or not."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment] # None ends the loop
        caller = frame.f_locals.get("self")
        if isinstance(caller, SimpleElasticAgent):
            return caller
    return None


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Has torchrun end with the message of an error that is raised inside, not with the traceback of its own frames."""
    try:
        yield
    except (AveragingError, RendezvousError) as error:
        _tell_without_traceback(error)
        raise


def _tell_without_traceback(error: Exception) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is error and _is_torchruns(trace) and not logger.isEnabledFor(logging.DEBUG):
            print(f"torchrun: {error}", file=sys.stderr)
        else:
            before(kind, value, trace)

    sys.excepthook = hook


def _is_torchruns(trace: TracebackType | None) -> bool:
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == TORCHRUN:
            return True
        trace = trace.tb_next
    return False
