"""A follower of the published weights: `python -m tests.endurance.follower JSON` with the options of `WeightFollower`.

It prints `ready`, `version` with the digest that was verified and that of the model's bytes, and `wrong`.
"""

from __future__ import annotations

from tests.endurance import hooked  # isort: skip  # before everything that reads the clock

import hashlib
import json
import sys
from typing import Any

import torch

from averaging import WeightFollower
from averaging.errors import AveragingError
from tests.endurance.trainer import Model, tell


def main(options: dict[str, Any]) -> None:
    hooked.obey()
    torch.set_num_threads(1)
    model = Model(options.pop("slots"))
    with WeightFollower(model, **options) as weights:
        tell("ready")
        while True:
            try:
                changed = weights.update(timeout=1.0)
            except AveragingError as error:
                tell("failure", message=str(error))
                continue
            if changed:
                found = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in model.parameters()))
                tell("version", version=weights.version, digest=found.hexdigest()[:16], sent=weights.bytes_sent)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
