"""Checks before a run: what will not work here, between two machines, and why.

Read in this order: `checks` (what a check and a finding are), `examination` (the order), `this_machine`, `other_peer`
(both end with the table of their checks), `connections`. What a peer answers is in `averaging.probe`.
"""

from averaging.doctor.checks import Finding as Finding, Severity as Severity
from averaging.doctor.examination import Examination as Examination, examine as examine
