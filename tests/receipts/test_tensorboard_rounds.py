"""averaging.integrations.loggers: what a run writes is read back by TensorBoard itself."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from averaging import LocalSGD, Outcome, Receipt
from averaging.integrations.loggers import RoundLogger, TensorBoardRounds, round_scalars
from averaging.receipts import Dropped, Straggler
from tests.support.training import SGD, Run, steps
from tests.trainers import page

RECEIPT = Receipt(
    round=7,
    outcome=Outcome.AVERAGED,
    members=("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    dropped=(Dropped("127.0.0.1:3", "sent nothing"),),
    seconds=2.0,
    allreduce_seconds=1.5,
    phases={"looking": 0.5, "allreduce": 1.5},
    bytes_sent=10,
    bytes_received=20,
    kept_local=4,
    straggler=Straggler("127.0.0.1:2", 0.25, "parts"),
)


def values(events: EventAccumulator, name: str) -> list[float]:
    return [event.value for event in events.Scalars(name)]


def test_the_page_s_own_lines_write_each_round_and_the_averagers_status(
    start: Callable[[], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start()

    def make(_: object, run_id: str, **options: Any) -> Any:
        return run.add(optimizer=SGD, **options)

    code = page.TENSORBOARD.replace("runs/a", str(tmp_path / "a")).replace("sync_every=50", "sync_every=2")
    exec(code, {"LocalSGD": LocalSGD, "model": None, "optimizer": None, "DecentralizedAverager": make})
    run.add(LocalSGD(sync_every=2), SGD)
    run.meet()
    run.each(lambda number: steps(run, number, range(6)))
    events = EventAccumulator(str(tmp_path / "a")).Reload()
    assert [event.step for event in events.Scalars("round/averaged")] == [1, 2, 3]
    assert values(events, "round/averaged") == [1, 1, 1]
    assert values(events, "round/members") == [2, 2, 2]
    assert all(value > 0 for value in values(events, "round/bytes_sent"))
    assert all(
        whole >= part > 0
        for whole, part in zip(values(events, "round/seconds"), values(events, "round/seconds/allreduce"), strict=True)
    )
    assert values(events, "averaging/local_step") == [2, 4, 6]
    assert values(events, "averaging/peers") == [2, 2, 2]
    assert capsys.readouterr().out.count("averaged with 1 other in") == 3  # on_round=print


def test_a_receipt_in_numbers() -> None:
    assert round_scalars(RECEIPT) == {
        "round/averaged": 1,
        "round/seconds": 2.0,
        "round/seconds/looking": 0.5,
        "round/seconds/allreduce": 1.5,
        "round/bytes_sent": 10,
        "round/bytes_received": 20,
        "round/members": 3,
        "round/dropped": 1,
        "round/kept_local": 4,
        "round/straggler_seconds": 0.25,
    }
    failed = round_scalars(Receipt(8, Outcome.NO_GROUP, "nobody else was seen"))
    assert (failed["round/averaged"], failed["round/straggler_seconds"]) == (0, 0)


def test_what_cannot_be_written_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class OnAFullDisk(RoundLogger):
        def __repr__(self) -> str:
            return "this log"

        def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
            with Path("/dev/full").open("w") as file:
                file.write(str(scalars))

    receipts: list[Receipt] = []
    rounds = OnAFullDisk(on_round=receipts.append)
    rounds(RECEIPT)
    rounds(RECEIPT)
    assert [record.getMessage() for record in caplog.records] == [
        "this log cannot write round 7: [Errno 28] No space left on device. Training continues"
    ]
    assert receipts == [RECEIPT, RECEIPT]


def test_a_logger_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from averaging.integrations.loggers import WandbRounds

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"needs wandb, .* python -m pip install '.\[wandb\]'"):
        WandbRounds()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"needs tensorboard, .* python -m pip install '.\[tensorboard\]'"):
        TensorBoardRounds(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
