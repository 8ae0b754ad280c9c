"""docs/operate/doctor.md lists every check, and its output and events are those of the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

from averaging import doctor
from averaging.doctor import Finding, Severity
from tests.support.pages import ROOT, blocks_of

PAGE = (ROOT / "docs" / "operate" / "doctor.md").read_text()
OWN = ("comparison", "examination", "memory", "other_peer", "this_machine", "tls")


def names_in_code() -> set[str]:
    names = set()
    for module in OWN:
        source = (Path(doctor.__file__).parent / f"{module}.py").read_text()
        names |= set(re.findall(r'\b(?:ok|warning|failure|told|kind|_mode_of|_compare)\(\s*"([a-z0-9-]+)"', source))
    return names | {"call-back", "ipv6", "python", *doctor.this_machine.PACKAGES}


def test_every_check_is_on_the_page() -> None:
    rows = re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    assert len(listed) > 25
    assert names_in_code() <= listed


def test_the_output_has_the_lines_of_the_command() -> None:
    [output] = [block.text for block in blocks_of(PAGE) if block.text.startswith("this machine\n")]
    marks = {severity.mark for severity in Severity}
    for line in output.splitlines():
        finding = re.fullmatch(r"  (.) ([a-z0-9-]+) +\S.*", line)
        assert finding is None or (finding[1] in marks and finding[2] in names_in_code()), line
    assert output.count("✗") == 2
    assert output.endswith("2 will not work, 1 may go wrong or could not be checked\n")


def test_the_event_has_the_fields_of_a_finding() -> None:
    for text in [block.text for block in blocks_of(PAGE) if block.language == "json"]:
        event = json.loads(text)
        assert event.pop("event") == "finding"
        assert Finding(**event | {"severity": Severity(event["severity"])}).remedy in PAGE
