"""The averager's rounds in Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from averaging import ConfigError, Receipt
from averaging.integrations.extras import missing
from averaging.integrations.rounds import RoundLogger


class WandbRounds(RoundLogger):
    """Writes each round to a run of Weights & Biases, under `round/…` over the number of the round at this peer.

    ```python
    rounds = WandbRounds(wandb.init(project="example"))
    opt = DecentralizedAverager(optimizer, run_id="example", strategy=LocalSGD(every=50), on_round=rounds)
    rounds.follow(opt)  # steps, samples and peers too, under `averaging/…`
    ```

    A round shares a step of W&B's own counter with your calls of `run.log`, and raises the counter only where another
    round came before your next call. So calls with `step=` lose nothing as long as they count calls of `opt.step`.

    Args:
        run: as `wandb.init()` returned it; if None, the one that is current at each round, such as a trainer's.
        on_round: called with each receipt afterwards.

    Raises:
        ImportError: no run was given, and W&B is not installed.
    """

    def __init__(self, run: Any = None, *, on_round: Callable[[Receipt], object] | None = None) -> None:
        super().__init__(on_round)
        self._given = run
        self._defined: Any = None  # the run whose axes are set
        self._open: int | None = None  # the step in which the last round was written, if it may still be open
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
        words = {
            "round/outcome": receipt.outcome.value,
            "round/straggler": "" if receipt.straggler is None else receipt.straggler.endpoint,
        }
        if run.step == self._open:
            run.log({}, commit=True)  # or this round would replace the last one
        run.log({"round/number": receipt.round, **scalars, **words}, commit=False)
        self._open = run.step


def _current() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise missing("wandb", "wandb") from error
    return wandb.run
