"""The averager in Lightning's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from averaging import ConfigError, DecentralizedAverager
from averaging.integrations.duties import Duties
from averaging.integrations.extras import missing

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise missing("lightning", "lightning") from error

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

REMEDY = "make the averager in configure_optimizers of the model, from self.parameters(); the model has its place then"


class AveragingCallback(Callback):
    """Trains a LightningModule with the averager that its `configure_optimizers` returns.

    ```python
    class Model(lightning.LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return DecentralizedAverager(optimizer, run_id="example", strategy=LocalSGD(every=50))

    trainer = lightning.Trainer(max_steps=1000, devices=1, callbacks=[AveragingCallback(wait_for=2)])
    trainer.fit(Model(), data)
    ```

    The training begins when the other peers are there. It ends for all peers with the same step, also for one that
    joined later. Then `opt.finish()` leaves the weights to export in the model, which `trainer.save_checkpoint` writes
    after `fit`; files that were written during the training hold what the peer had before. The averager is closed when
    the Trainer has ended, also after an error or Ctrl+C. GradientAveraging is told the samples behind each step. The
    Trainer's loggers get the averager's status, as `averaging/local_step` and so on.

    Args:
        wait_for: peers, this one included, for which the training waits at its start.
        timeout: seconds to wait for them, and at the end for the other peers to finish.
        global_steps: of the run, after which the training ends, with strategies that count them; the Trainer's
            `max_steps` must be large enough then. None: it ends after `max_steps` local steps of the run.
        batch_size: samples behind each step; None: as counted in the batches.
    """

    def __init__(
        self,
        *,
        wait_for: int = 1,
        timeout: float = 60.0,
        global_steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"wait_for": wait_for, "timeout": timeout, "global_steps": global_steps}
        self._batch_size = batch_size
        self._duties: Duties | None = None
        self._steps = 0.0  # of the whole training
        self._samples = 0  # behind the next step
        self._logged = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what would make several peers of one training.

        Raises:
            ConfigError: the Trainer has several processes.
        """
        if stage == "fit" and trainer.world_size > 1:
            raise ConfigError(
                f"Lightning trains with {trainer.world_size} processes, each of which would be a peer; give the "
                "Trainer devices=1 and num_nodes=1. docs/coming-from.md has DDP inside a machine"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the averager from the Trainer's optimizers, before a checkpoint is loaded into it.

        Raises:
            ConfigError: there is none, or it cannot be trained with.
        """
        averagers = _averagers(trainer)
        if len(averagers) != 1:
            raise ConfigError(
                f"the Trainer has {len(averagers)} averagers among its optimizers; return one DecentralizedAverager "
                "from configure_optimizers"
            )
        averager = averagers[0]
        if averager.scheduler is not None and trainer.lr_scheduler_configs:
            raise ConfigError(
                "configure_optimizers returns a scheduler, and the averager has one; leave one of them out: the "
                "averager's follows the run"
            )
        self._duties = Duties(averager, **self._options)
        self._duties.check(pl_module, REMEDY)
        if trainer.ckpt_path is not None:
            self._duties.check_resumed()
        averager.register_step_pre_hook(self._tell_samples)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the other peers."""
        self._steps = trainer.estimated_stepping_batches if trainer.max_steps == -1 else trainer.max_steps
        self._taken.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the samples behind the next step."""
        if self._batch_size is None and self._taken.counts_samples:
            if batch_idx % trainer.accumulate_grad_batches == 0:
                self._samples = 0
            self._samples += extract_batch_size(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the training with that of the run, and logs."""
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0 and trainer.global_step != self._logged:
            self._logged = trainer.global_step
            for logger in trainer.loggers:
                logger.log_metrics(self._taken.scalars(), step=trainer.global_step - 1)  # as Lightning counts
        trainer.should_stop |= self._taken.is_over(self._steps)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the training together with the other peers."""
        self._taken.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Closes the averager."""
        _close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Closes the averager."""
        if stage == "fit":
            _close(trainer)

    @property
    def _taken(self) -> Duties:
        if self._duties is None:
            raise RuntimeError("called before on_fit_start")
        return self._duties

    def _tell_samples(self, _: object, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        samples = (self._samples or None) if self._batch_size is None else self._batch_size
        return arguments, {"batch_size": samples, **options}


def _averagers(trainer: Trainer) -> list[DecentralizedAverager]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, DecentralizedAverager)]


def _close(trainer: Trainer) -> None:
    for averager in _averagers(trainer):
        averager.close()
