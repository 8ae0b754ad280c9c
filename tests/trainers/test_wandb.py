"""averaging.integrations.loggers with the real library, offline; what it has kept is read back from its file."""

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from wandb.proto import wandb_internal_pb2

from averaging import LocalSGD, Outcome, Receipt
from averaging.integrations.loggers import TensorBoardRounds, WandbRounds
from averaging.receipts import Straggler
from tests.support.training import Run, steps
from tests.trainers import page

pytestmark = pytest.mark.integrations

RECEIPT = Receipt(
    round=3,
    outcome=Outcome.AVERAGED,
    members=("127.0.0.1:1", "127.0.0.1:2"),
    seconds=0.5,
    bytes_sent=10,
    straggler=Straggler("127.0.0.1:2", 0.25, "parts"),
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    wandb.teardown()


def records(data: bytes) -> Iterator[Any]:
    """The records of a run's file: LevelDB's log format, after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def kept(folder: Path) -> list[dict[str, Any]]:
    """What was logged in the only run in a folder, call by call."""
    wandb.teardown()  # its process ends once it has written everything
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(file.read_bytes())
        if record.HasField("history")
    ]


def test_each_round_is_kept_with_the_averagers_status(run: Run, tmp_path: Path) -> None:
    names: dict[str, Any] = {"wandb": wandb, "LocalSGD": LocalSGD, "model": None, "optimizer": None}
    names["DecentralizedAverager"] = lambda _, run_id, **options: run.add(
        strategy=options["strategy"], optimizer=lambda p: torch.optim.SGD(p, lr=0.05), on_round=options["on_round"]
    )
    exec(page.WANDB.replace("sync_every=50", "sync_every=2"), names)
    run.add(LocalSGD(sync_every=2), lambda p: torch.optim.SGD(p, lr=0.05))
    run.meet()
    run.each(lambda number: steps(run, number, range(4)))
    wandb.finish()
    first, second = kept(tmp_path)
    for number, row in enumerate((first, second), 1):
        assert row["round/number"] == number
        assert row["round/averaged"] == 1
        assert row["round/outcome"] == "averaged"
        assert row["round/members"] == 2
        assert row["round/bytes_sent"] > 0
        assert row["round/seconds"] >= row["round/seconds/allreduce"] > 0
        assert row["averaging/local_step"] == 2 * number
        assert row["averaging/peers"] == 2


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of the integrations; W&B notes a lot."""
    return [record.getMessage() for record in caplog.records if record.name == "averaging.integrations"]


def test_the_current_run_is_taken_if_none_is_given_and_another_logger_gets_the_receipt_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receipts: list[Receipt] = []
    rounds = WandbRounds(on_round=TensorBoardRounds(tmp_path / "board", on_round=receipts.append))
    rounds(RECEIPT)
    with wandb.init(project="example"):
        rounds(RECEIPT)
    rounds(RECEIPT)  # that there is no run was told already
    assert warnings(caplog) == [
        "WandbRounds(None) cannot write round 3: there is no current run; call wandb.init() before the first round. "
        "Training continues"
    ]
    (row,) = kept(tmp_path)
    assert row["round/straggler"] == "127.0.0.1:2"
    assert row["round/straggler_seconds"] == 0.25
    assert receipts == [RECEIPT] * 3


def test_neither_rounds_nor_calls_that_count_their_own_steps_are_lost(tmp_path: Path) -> None:
    with wandb.init(project="example") as run:
        rounds = WandbRounds(run)
        for step in range(6):
            if step in (0, 1, 3, 4):
                rounds(replace(RECEIPT, round=step))
            if step in (0, 1, 2, 5):
                run.log({"loss": step}, step=step)
        rounds(replace(RECEIPT, round=6))
        run.log({"loss": 7}, step=7)
        rounds(replace(RECEIPT, round=8))
        rounds(replace(RECEIPT, round=9))
    rows = kept(tmp_path)
    assert [row["loss"] for row in rows if "loss" in row] == [0, 1, 2, 5, 7]
    assert [row["round/number"] for row in rows if "round/number" in row] == [0, 1, 3, 4, 6, 8, 9]
