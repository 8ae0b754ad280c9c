"""averaging.integrations.lightning in a real Trainer."""

import csv
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from averaging import AveragingError, ConfigError, DecentralizedAverager, LocalSGD, Strategy
from averaging.integrations.lightning import AveragingCallback
from tests.support.training import Run
from tests.trainers import page
from tests.trainers.partner import RUN_ID, Noted, founder, going_on

pytestmark = [
    pytest.mark.integrations,
    # Lightning's own use of torch, and its advice.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
]


class Model(lightning.LightningModule):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        (x,) = batch
        loss: torch.Tensor = (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        return loss


class Averaged(Model):
    """With an averager, and what it was made with."""

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        super().__init__()
        self.strategy, self.options = strategy, options
        self.opt: DecentralizedAverager | None = None

    def configure_optimizers(self) -> Any:
        """The averager."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.opt = DecentralizedAverager(optimizer, model=self, run_id=RUN_ID, strategy=self.strategy, **self.options)
        return self.opt


def data_of(samples: int) -> DataLoader[Any]:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs), batch_size=4)


def trainer_of(folder: Path | str, callback: lightning.Callback | None = None, **options: Any) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    usual: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": -1}
    usual |= {"logger": CSVLogger(folder), "log_every_n_steps": 1}
    callbacks = [AveragingCallback() if callback is None else callback]
    return lightning.Trainer(callbacks=callbacks, default_root_dir=folder, **(quiet | usual | options))


def assert_closed(opt: DecentralizedAverager | None) -> None:
    assert opt is not None
    with pytest.raises(AveragingError, match="has been closed"):
        opt.peers  # noqa: B018


def page_peer(number: int, endpoints: SimpleQueue[str]) -> None:
    torch.manual_seed(number)
    # The page's own call but for what would be written and shown.
    trainer = partial(lightning.Trainer, accelerator="cpu", logger=False, enable_checkpointing=False)
    own = type("lightning", (), {"Trainer": trainer})
    page.run_as_one_of_two(page.LIGHTNING, number, endpoints, {"lightning": own, "Model": Model, "data": data_of(40)})


def rank(number: int, ports: SimpleQueue[str]) -> None:
    page.as_rank(number, ports)
    try:
        trainer_of(".", devices=2, strategy="ddp", logger=False, max_steps=1).fit(Averaged(LocalSGD(4)), data_of(8))
    except ConfigError as error:
        page.tell_error(error)
    torch.distributed.destroy_process_group()


def test_a_newcomer_ends_with_the_run_logs_and_is_closed(run: Run, tmp_path: Path) -> None:
    first = founder(run, Model(), 5)
    model = Averaged(LocalSGD(4), join=[first.endpoint], group_size=2, group_wait=30.0)
    # A newcomer does not wait.
    trainer = trainer_of(tmp_path, AveragingCallback(wait_for=9), max_steps=13, log_every_n_steps=2)
    with going_on(run, 8) as told:
        trainer.fit(model, data_of(80))
    assert told == ["all 2 peers hold the same weights"]
    assert trainer.global_step == 9  # newcomers take over the last turn's state, of step 4
    assert model.opt is not None
    assert model.opt.local_step == 13
    assert_closed(model.opt)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)["state_dict"]
    for name, parameter in run.models[0].named_parameters():
        torch.testing.assert_close(saved[name], parameter, rtol=0, atol=0)
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert [row["averaging/local_step"] for row in logged] == ["6", "8", "10", "12"]
    assert [row["step"] for row in logged] == ["1", "3", "5", "7"]


def test_samples_are_counted_and_the_averagers_schedule_is_followed_until_the_global_steps_are_made(
    tmp_path: Path,
) -> None:
    strategy, schedule = Noted(10), partial(LinearLR, total_iters=4)
    model = Averaged(strategy, scheduler=schedule)
    callback = AveragingCallback(global_steps=3)
    trainer_of(tmp_path, callback, max_steps=100, accumulate_grad_batches=2).fit(model, data_of(21))
    assert strategy.told == [8, 8, 5, 8, 8, 5]  # 21 samples are 5 batches of 4 and one of 1
    assert model.opt is not None
    assert model.opt.global_step == 3
    assert model.opt.param_groups[0]["lr"] == pytest.approx(0.01 * (1 / 3 + 2 / 3 * 3 / 4))


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "counted"),
    [(7, 1, [7, 7, 7]), (lambda batch: 3 * len(batch[0]), 2, [3 * 8, 3 * 8, 3 * 5])],
)
def test_a_batch_size_that_is_given_counts(
    batch_size: Any, accumulated: int, counted: list[int], tmp_path: Path
) -> None:
    strategy = Noted(10)
    trainer = trainer_of(
        tmp_path, AveragingCallback(batch_size=batch_size), max_steps=3, accumulate_grad_batches=accumulated
    )
    trainer.fit(Averaged(strategy), data_of(21))
    assert strategy.told == counted


def test_an_error_closes_the_averager(tmp_path: Path) -> None:
    class Failing(Averaged):
        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            raise RuntimeError("failed")

    model = Failing(LocalSGD(4))
    with pytest.raises(RuntimeError, match="failed"):
        trainer_of(tmp_path, max_steps=3).fit(model, data_of(8))
    assert_closed(model.opt)


def test_a_checkpoint_is_resumed_by_who_is_first_and_refused_to_a_newcomer(run: Run, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=3)
    trainer.fit(Averaged(LocalSGD(4)), data_of(12))
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    model = Averaged(LocalSGD(4))
    trainer_of(tmp_path, max_steps=5).fit(model, data_of(12), ckpt_path=tmp_path / "3.ckpt", weights_only=False)
    assert model.opt is not None
    assert model.opt.local_step == 5
    first = founder(run, Model(), 5)
    newcomer = Averaged(LocalSGD(4), join=[first.endpoint])
    with pytest.raises(ConfigError, match="joined a run in progress .* train without the checkpoint"):
        trainer_of(tmp_path, max_steps=5).fit(newcomer, data_of(12), ckpt_path=tmp_path / "3.ckpt", weights_only=False)
    assert_closed(newcomer.opt)


def no_averager(folder: Path) -> None:
    model = Model()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters())
    trainer_of(folder, max_steps=1).fit(model, data_of(4))


def two_schedulers(folder: Path) -> None:
    class Scheduled(Averaged):
        def configure_optimizers(self) -> Any:
            opt = super().configure_optimizers()
            return [opt], [LinearLR(opt)]

    trainer_of(folder, max_steps=1).fit(Scheduled(LocalSGD(4), scheduler=LinearLR), data_of(4))


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (no_averager, "0 averagers among its optimizers; return one DecentralizedAverager from configure_optimizers"),
        (two_schedulers, "returns a scheduler, and the averager has one; remove one"),
    ],
)
def test_what_cannot_work_is_said_with_its_remedy(do: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        do(tmp_path)
