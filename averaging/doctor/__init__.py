"""Checks before a run: what will not work here, between two machines, and why.

Read in this order: `findings`, `examination` (the order of all checks), `this_machine`, `tls`, `memory`, `other_peer`;
and the side of a peer that is asked: `probe`, `dial_back`. Then what is measured: `deep`, `path`, and both sides of
`transfer`.
"""

from averaging.doctor.examination import Examination, examine
from averaging.doctor.findings import Finding, Severity, exit_code
from averaging.doctor.memory import memory_of_file
from averaging.doctor.probe import SOFTWARE, ProbeService
from averaging.doctor.transfer import TransferService

__all__ = [
    "SOFTWARE",
    "Examination",
    "Finding",
    "ProbeService",
    "Severity",
    "TransferService",
    "examine",
    "exit_code",
    "memory_of_file",
]
