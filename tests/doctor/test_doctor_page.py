"""docs/operate/doctor.md lists every check."""

import re

from averaging.doctor import other_peer, this_machine
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "operate" / "doctor.md").read_text()
CHECKS = {check.name for check in this_machine.CHECKS} | {"join", "discovery"}
CHECKS |= {check.name for check in (*other_peer.CHECKS, *other_peer.DEEP)}


def test_every_check_is_on_the_page() -> None:
    rows = re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    assert listed == CHECKS
