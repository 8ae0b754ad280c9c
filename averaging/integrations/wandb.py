"""Logs the averager's rounds to Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from averaging.errors import ConfigError
from averaging.integrations.duties import RoundLogger, missing
from averaging.receipts import Receipt


class WandbRounds(RoundLogger):
    """Writes each round to a W&B run, under `round/…`, with the number of the round at this peer as the step.

    ```python
    rounds = WandbRounds(wandb.init(project="example"))
    opt = DecentralizedAverager(
        optimizer, model=model, run_id="example", strategy=LocalSGD(sync_every=50), on_round=rounds
    )
    rounds.follow(opt)  # steps, samples and peers too, under `averaging/…`
    ```

    A round shares a step of W&B's own counter with your calls of `run.log`. It increments the counter only if another
    round is logged before your next call. So calls with `step=` lose no data if they count calls of `opt.step`.

    Args:
        run: the value of `wandb.init()`. If None, the current run at each round is used, such as a trainer's.
        on_round: called with each receipt afterwards.

    Raises:
        ImportError: `run` is None, and W&B is not installed.
    """

    def __init__(self, run: Any = None, *, on_round: Callable[[Receipt], object] | None = None) -> None:
        super().__init__(on_round)
        self._given = run
        self._defined: Any = None  # the run whose metrics are defined
        self._open: int | None = None  # step of the last round, which may not be committed yet
        if run is None:
            _current()

    def __repr__(self) -> str:
        return f"WandbRounds({self._given!r})"

    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
        """Writes the numbers, the outcome and the straggler."""
        run = _current() if self._given is None else self._given
        if run is None:
            raise ConfigError("there is no current run; call wandb.init() before the first round")
        if run is not self._defined:
            run.define_metric("round/number")
            run.define_metric("round/*", step_metric="round/number")
            run.define_metric("averaging/*", step_metric="round/number")
            self._defined, self._open = run, None
        texts = {
            "round/outcome": receipt.outcome.value,
            "round/straggler": "" if receipt.straggler is None else receipt.straggler.endpoint,
        }
        if run.step == self._open:
            run.log({}, commit=True)  # else this round would overwrite the last one
        run.log({"round/number": receipt.round, **scalars, **texts}, commit=False)
        self._open = run.step


def _current() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise missing("wandb", "wandb") from error
    return wandb.run
