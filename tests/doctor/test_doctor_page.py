"""docs/operate/doctor.md lists every check, and its output and events are those of the command."""

from __future__ import annotations

import json
import re

from averaging.doctor import Finding, Severity, other_peer, this_machine
from tests.support.pages import ROOT, blocks_of

PAGE = (ROOT / "docs" / "operate" / "doctor.md").read_text()
CHECKS = {check.name for check in this_machine.CHECKS} | {"join", "discovery"}
CHECKS |= {check.name for check in (*other_peer.CHECKS, *other_peer.DEEP)}


def test_every_check_is_on_the_page() -> None:
    rows = re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    assert listed == CHECKS


def test_the_output_has_the_lines_of_the_command() -> None:
    [output] = [block.text for block in blocks_of(PAGE) if block.text.startswith("this machine\n")]
    marks = {severity.mark for severity in Severity}
    for line in output.splitlines():
        finding = re.fullmatch(r"  (.) ([a-z0-9-]+) +\S.*", line)
        assert finding is None or (finding[1] in marks and finding[2] in CHECKS), line
    assert output.count("✗") == 2
    assert output.endswith("2 will not work, 1 may go wrong or could not be checked\n")


def test_the_event_has_the_fields_of_a_finding() -> None:
    for text in [block.text for block in blocks_of(PAGE) if block.language == "json"]:
        event = json.loads(text)
        assert event.pop("event") == "finding"
        assert Finding(**event | {"severity": Severity(event["severity"])}).remedy in PAGE
