"""How the owner of a process ends it in order over the network: `averaging leave`.

Read in this order: `departure` (the method, and how far the process is), `socket_owner` (whether a caller is this user
on this machine).
"""

from averaging.control.departure import LEAVE, LEAVE_REQUEST, ControlService, Departure, LeaveStep, step_of
from averaging.control.socket_owner import is_own_user

__all__ = ["LEAVE", "LEAVE_REQUEST", "ControlService", "Departure", "LeaveStep", "is_own_user", "step_of"]
