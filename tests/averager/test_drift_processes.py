"""Peers that differ are named over gRPC: in the log, in receipts, in the status, and by the commands."""

import json
import logging
import re
from functools import partial
from pathlib import Path

import pytest

from averaging import DiLoCo, GradientAveraging, Mode
from averaging.receipts.explanation import Round, describe, explain
from averaging.receipts.receipt import Receipt
from averaging.receipts.receipt_log import read
from tests.support.training import SGD, Run, Start, gather_until, step

DECAYING = partial(SGD, weight_decay=0.5)


def train(run: Run, steps: int) -> None:
    def each(number: int) -> None:
        for seed in range(steps):
            step(run, number, seed, batch_size=4)

    run.each(each)


def last(run: Run, number: int) -> Receipt:
    receipt = run.averagers[number].last_receipt
    assert receipt is not None
    return receipt


def test_it_is_named_everywhere(start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    run, files = start(), [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    run.add(GradientAveraging(8), SGD, receipts=files[0])
    odd = run.add(GradientAveraging(8), DECAYING, receipts=files[1])
    run.meet()
    run.each(lambda number: gather_until(run, number, 4))
    text = f"{odd.endpoint} has weight_decay = 0.5, the others 0"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(text in warning for warning in warnings) == 2  # once at each peer
    assert len([warning for warning in warnings if f"drift: {odd.endpoint} differs in '" in warning]) == 2
    for averager in run.averagers:
        assert f"DRIFT: {text}" in str(averager.status)
        assert f"DRIFT: {text}" in str(averager.status.peer)
    assert last(run, 0).drift == last(run, 1).drift
    receipts = [receipt for file in files for receipt in read(file.read_bytes().splitlines(keepends=True)).receipts]
    assert json.loads(files[0].read_text().splitlines()[-1])["drift"][0]["name"] == "weight_decay"
    assert f"DRIFT: {text}" in describe(Round((last(run, 0),)))  # as `averaging watch` shows it
    assert any(re.match(rf"drift: {odd.endpoint} in \d rounds?, first: {text}", line) for line in explain(receipts))


def test_equal_peers_a_client_and_a_newcomer_are_not_named(start: Start) -> None:
    run, receipts = start(), list[Receipt]()
    momentum = partial(SGD, momentum=0.9)
    for mode in (Mode.NODE, Mode.NODE, Mode.CLIENT):
        run.add(
            DiLoCo(4, fragments=2, delay=1, alpha=0.5), momentum, mode=mode, on_round=receipts.append, group_wait=3.0
        )
        run.meet()
        train(run, 8)
    assert [receipt.drift for receipt in receipts if receipt.drift] == []
    assert any(receipt.averaged and len(receipt.members) > 1 for receipt in receipts)
