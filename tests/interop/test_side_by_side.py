"""Both servers give the same answers to the same requests."""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.feed.feeds import Feed, a_group, registration
from tests.interop.atropos import RunApi

pytestmark = pytest.mark.interop

REGISTRATION = {name: getattr(registration(8), name) for name in registration().__struct_fields__}


@pytest.mark.parametrize("seed", range(4))
def test_a_random_run(seed: int, tmp_path: Path) -> None:
    """Compares status, registrations, buffers and batches, one at a time. Even seeds have a reservation."""
    rng, reserved = random.Random(seed), seed % 2 == 0
    with ExitStack() as stack:
        servers = (stack.enter_context(RunApi()), stack.enter_context(Feed(tmp_path / "feed.sqlite")))
        clients = [stack.enter_context(httpx.Client(base_url=each.url, timeout=60)) for each in servers]

        def both(method: str, path: str, body: object = None) -> Any:
            replies = [client.request(method, path, json=body) for client in clients]
            assert replies[0].status_code == replies[1].status_code == 200, (path, replies[1].text)
            original, mine = (reply.json() for reply in replies)
            if path == "/batch":
                mine.pop("step", None)
                if original["batch"] and reserved:  # the original puts the reserved groups first
                    original["batch"].sort(key=lambda group: group["tokens"])
                    mine["batch"].sort(key=lambda group: group["tokens"])
            if path == "/register":
                assert {type(original["uuid"]), type(mine["uuid"])} == {int}
            else:
                assert mine == original, path
            return mine

        for path in ("/", "/info", "/wandb_info", "/status", "/latest_example"):
            both("GET", path)
        both("GET", "/batch")
        env = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": 2}
        both("POST", "/register", REGISTRATION)
        both("POST", "/register-env", env)
        both("GET", "/batch")
        for number in range(3):
            part = {"min_batch_allocation": 0.25} if number == 0 and reserved else {}
            both("POST", "/register-env", env | part | {"weight": 1.0 + number})
        waiting = step = 0
        for number in range(80):
            match rng.randrange(5):
                case 0 | 1:
                    size = rng.choice([1, 2, 2])
                    group = msgspec.to_builtins(a_group(number, size)) | {"env_id": rng.randrange(3)}
                    both("POST", "/scored_data", group)
                case 2:
                    some = [
                        msgspec.to_builtins(a_group(100 + number, 2)) | {"env_id": e} for e in range(rng.randrange(3))
                    ]
                    both("POST", "/scored_data_list", some)
                case 3:
                    for env_id in range(3):
                        both("GET", "/status-env", {"env_id": env_id})
                case 4:
                    both("GET", "/latest_example")
            waiting = both("GET", "/status")["queue_size"]
            # Fetched before the original could form two batches at once, of which it delivers the last first.
            if waiting >= 4:
                step += both("GET", "/batch")["batch"] is not None
                assert both("GET", "/status")["current_step"] == step
            if number == 60:
                both("POST", "/disconnect-env", {"env_id": 0})
        assert step
