"""Receipts as JSON lines: there and back, what is no receipt, and files that cannot be written."""

import io
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from averaging.receipts import receipt_log
from averaging.receipts.receipt import DropCode, LateArrival, Receipt
from averaging.receipts.receipt_log import ReceiptLog, dumps, loads, read
from tests.receipts.made import SILENT, A, receipt, receipts

RECEIPT = receipt(A, dropped=(SILENT,))


@given(receipts)
def test_there_and_back(one: Receipt) -> None:
    line = dumps(one)
    assert line.isascii()
    assert line.isprintable()
    assert loads(line) == one


def test_the_form_has_plain_names_and_types() -> None:
    told = json.loads(dumps(RECEIPT))
    assert (told["version"], told["group_id"], told["role"]) == (1, "11" * 20, "follower")
    assert told["dropped"] == [
        {
            "endpoint": SILENT.endpoint,
            "reason": "sent nothing for 4.1 s, deadline 4.0 s = 3 × its median",
            "code": "silent",
            "waited": 4.12,
            "deadline": 4.0,
            "basis": "3 × its median",
        }
    ]
    assert set(told) == {"version", *Receipt.__slots__}


def test_fields_and_codes_of_later_releases_are_passed_over_and_those_of_this_one_may_be_missing() -> None:
    told = json.loads(dumps(receipt(A, dropped=(SILENT,), last_to_arrive=LateArrival(A, 9.0)))) | {"colour": "red"}
    told["dropped"][0] |= {"code": "bored", "mood": 3}
    del told["last_to_arrive"]
    for account in told["accounts"]:
        del account["waited"], account["step_rate"]
    expected = receipt(A, dropped=(replace(SILENT, code=DropCode.OTHER),))
    assert loads(json.dumps(told)) == expected


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ('{"version": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", 'not a JSON object with "version"'),
        ('{"event": "round"}', 'not a JSON object with "version"'),
        ('{"version": 2}', "has format version 2; this release reads version 1"),
        ('{"version": 1, "outcome": "averaged"}', "missing required field `round`"),
        ('{"version": 1, "outcome": "averaged", "round": "3"}', r"Expected `int`, got `str` - at `\$.round`"),
        ('{"version": 1, "outcome": "won", "round": 3}', r"Invalid enum value 'won' - at `\$.outcome`"),
        ('{"version": 1, "outcome": "failed", "round": 3, "group_id": "xy"}', "not a receipt: .*hex"),
        ('{"version": 1, "outcome": "failed", "round": 3, "group_id": 7}', "not a receipt"),
        ('{"version": 1, "outcome": "failed", "round": 3, "dropped": [{"endpoint": 1}]}', r"\$.dropped\[0\]"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_no_receipt(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        loads(line)


def test_bad_lines_are_numbered_and_a_last_one_may_be_cut_off() -> None:
    good = dumps(RECEIPT).encode()
    found = read(io.BytesIO(b"\n".join([good, b"", b"garbage", good, good[:50]])))
    assert found.receipts == [RECEIPT, RECEIPT]
    assert list(found.bad) == [3]
    assert found.cut_off
    assert read(io.BytesIO(good)) == receipt_log.Recorded([RECEIPT], {}, False)
    assert list(read(io.BytesIO(good[:50] + b"\n")).bad) == [1]


def written(path: Path) -> receipt_log.Recorded:
    with path.open("rb") as file:
        return read(file)


@pytest.mark.parametrize("moved", [True, False])
def test_every_receipt_is_in_the_file_at_once_also_if_it_is_moved_away_or_removed(tmp_path: Path, moved: bool) -> None:
    path = tmp_path / "receipts.jsonl"
    log = ReceiptLog(path)
    for count in (1, 2):
        log.append(RECEIPT)
        assert len(written(path).receipts) == count
    if moved:
        path.rename(tmp_path / "receipts.jsonl.1")
    else:
        path.unlink()
    log.append(RECEIPT)
    ReceiptLog(path).append(RECEIPT)
    assert len(written(path).receipts) == 2


def test_a_line_that_was_cut_off_spoils_no_further_one(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(dumps(RECEIPT).encode()[:50])
    book = ReceiptLog(path)
    book.append(RECEIPT)
    book.append(RECEIPT)
    found = written(path)
    assert found.receipts == [RECEIPT, RECEIPT]
    assert list(found.bad) == [1]


def test_a_full_disk_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    book = ReceiptLog("/dev/full")
    for _ in range(3):
        book.append(RECEIPT)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "could not write the receipt of round 17 to /dev/full: No space left on device" in record.message
    assert "averaging continues" in record.message


def test_a_disk_that_is_freed_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later" / "receipts.jsonl"
    book = ReceiptLog(path)
    book.append(RECEIPT)
    book.append(RECEIPT)
    path.parent.mkdir()
    book.append(RECEIPT)
    assert [record.message.split(str(path))[-1] for record in caplog.records][1:] == [" again; 2 are missing"]
    assert written(path).receipts == [RECEIPT]


def test_a_pipe_that_nobody_reads_does_not_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ReceiptLog(pipe).append(RECEIPT)
    assert "could not write the receipt" in caplog.text
