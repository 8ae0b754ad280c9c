"""Use of the averager in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from averaging.averager import DecentralizedAverager
from averaging.errors import ConfigError
from averaging.integrations.loggers import TrainerHooks, missing, weighs_steps

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise missing("lightning", "lightning") from error

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

REMEDY = "create the averager in configure_optimizers of the model, from self.parameters(), after the model was moved"


class AveragingCallback(Callback):
    """Trains a LightningModule with the averager that its `configure_optimizers` returns.

    ```python
    class Model(lightning.LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return DecentralizedAverager(optimizer, model=self, run_id="example", strategy=LocalSGD(sync_every=50))

    trainer = lightning.Trainer(max_steps=1000, devices=1, callbacks=[AveragingCallback(wait_for=2)])
    trainer.fit(Model(), data)
    ```

    The training waits for the other peers, and ends at the same step for all, also for those that joined later. The
    final weights are then in the model; save them with `trainer.save_checkpoint` after `fit`.
    Checkpoints written during the training have this peer's weights at that time. The averager is closed when the
    Trainer ends, also after an error or Ctrl+C. GradientAveraging and `weight="samples"` get the number of samples of
    each step. The Trainer's loggers get the averager's status, as `averaging/local_step` and so on.

    Args:
        wait_for: number of peers, including this one, for which the training waits at its start.
        timeout: seconds to wait for them, and at the end for the other peers to finish.
        global_steps: global steps after which the training ends, if the strategy has them; the Trainer's `max_steps`
            must be large enough. None: the training ends after `max_steps` local steps of the run.
        batch_size: samples per step, or a function of a batch that returns the number by which its loss is divided,
            such as `lambda batch: int(batch["labels"].ne(-100).sum())` for tokens. None counts the batches' samples.
    """

    def __init__(
        self,
        *,
        wait_for: int = 1,
        timeout: float = 60.0,
        global_steps: int | None = None,
        batch_size: int | Callable[[Any], int] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"wait_for": wait_for, "timeout": timeout, "global_steps": global_steps}
        self._batch_size = batch_size
        self._hooks: TrainerHooks | None = None
        self._max_steps = 0.0
        self._logged = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.world_size > 1:
            raise ConfigError(
                f"Lightning trains with {trainer.world_size} processes, each of which would be a peer; give the "
                "Trainer devices=1 and num_nodes=1. docs/how-to/gpus.md describes DDP inside a machine"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the averager among the Trainer's optimizers, before a checkpoint is loaded into it."""
        averagers = _averagers(trainer)
        if len(averagers) != 1:
            raise ConfigError(
                f"the Trainer has {len(averagers)} averagers among its optimizers; return one DecentralizedAverager "
                "from configure_optimizers"
            )
        averager = averagers[0]
        if averager.scheduler is not None and trainer.lr_scheduler_configs:
            raise ConfigError(
                "configure_optimizers returns a scheduler, and the averager has one; remove one: the averager's "
                "follows the run"
            )
        self._hooks = TrainerHooks(averager, **self._options)
        self._hooks.check(pl_module, REMEDY)
        if trainer.ckpt_path is not None:
            self._hooks.check_resumed()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the other peers."""
        self._max_steps = trainer.estimated_stepping_batches if trainer.max_steps == -1 else trainer.max_steps
        self._started.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        hooks, before = self._started, 0
        if batch_idx % trainer.accumulate_grad_batches:
            before = hooks.divisor or 0
        if isinstance(self._batch_size, int):
            hooks.divisor = self._batch_size
        elif self._batch_size is not None:
            hooks.divisor = before + self._batch_size(batch)
        elif weighs_steps(_averagers(trainer)[0]):
            hooks.divisor = before + extract_batch_size(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0 and trainer.global_step != self._logged:
            self._logged = trainer.global_step
            for logger in trainer.loggers:
                logger.log_metrics(self._started.scalars(), step=trainer.global_step - 1)  # as Lightning counts
        trainer.should_stop |= self._started.is_over(self._max_steps)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _close(trainer)

    @property
    def _started(self) -> TrainerHooks:
        if self._hooks is None:
            raise RuntimeError("called before on_fit_start")
        return self._hooks


def _averagers(trainer: Trainer) -> list[DecentralizedAverager]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, DecentralizedAverager)]


def _close(trainer: Trainer) -> None:
    for averager in _averagers(trainer):
        averager.close()
