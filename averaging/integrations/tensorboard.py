"""Logs the averager's rounds to TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from averaging.integrations.duties import RoundLogger, missing
from averaging.receipts import Receipt

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardRounds(RoundLogger):
    """Writes each round to TensorBoard, under `round/…`, with the number of the round at this peer as the step.

    ```python
    rounds = TensorBoardRounds("runs/a")
    opt = DecentralizedAverager(
        optimizer, model=model, run_id="example", strategy=LocalSGD(sync_every=50), on_round=rounds
    )
    rounds.follow(opt)  # steps, samples and peers too, under `averaging/…`
    ```

    Args:
        writer: a SummaryWriter, or a folder for a new one. Each peer needs its own folder.
        on_round: called with each receipt afterwards.

    Raises:
        ImportError: `writer` is a folder, and TensorBoard is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(
        self, writer: SummaryWriter | str | Path, *, on_round: Callable[[Receipt], object] | None = None
    ) -> None:
        super().__init__(on_round)
        self._writer = _open(writer) if isinstance(writer, str | Path) else writer

    @property
    def writer(self) -> SummaryWriter:
        """The SummaryWriter, for your own scalars."""
        return self._writer

    def __repr__(self) -> str:
        return f"TensorBoardRounds({self._writer.log_dir!r})"

    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
        """Writes the numbers, and the receipt as text."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, receipt.round)
        text = f"{receipt}" if receipt.straggler is None else f"{receipt}; waited for {receipt.straggler.endpoint}"
        self._writer.add_text("round/receipt", text, receipt.round)
        self._writer.flush()


def _open(folder: str | Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("tensorboard", "tensorboard") from error
    Path(folder).mkdir(parents=True, exist_ok=True)  # with TensorFlow installed, the writer raises no OSError
    return SummaryWriter(str(folder))
