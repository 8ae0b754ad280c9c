"""Versions through a folder: on a disk, behind a web server, and in a bucket of a real S3 server."""

from __future__ import annotations

import asyncio
import functools
import http.server
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from averaging import ConfigError, DecentralizedAverager, LocalSGD, StateError, WeightFollower, WeightPublisher
from averaging.errors import CallRefusedError
from averaging.rpc import RpcServer
from averaging.weights import storage
from averaging.weights.receiver import ModelReceiver
from averaging.weights.storage import Index, Step, StoredVersion, route
from tests.support.ports import free_port
from tests.support.processes import DEADLINE, averaging_process
from tests.weights.test_weights import LIMIT, averager, follow, has, holds, model, same, state, stepped, train

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

SMALL = 1 << 16


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(storage, "MAX_PAUSE", 0.2)


def index(folder: Path) -> Index:
    return msgspec.json.decode((folder / "index.json").read_bytes(), type=Index)


def names(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.iterdir() if not path.name.endswith(".json")}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(folder: Path, version: int) -> None:
    until(lambda: (folder / "index.json").exists() and index(folder).versions[-1].version == version)


def publish(publisher: WeightPublisher, folder: Path, versions: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Each version is in the folder before the next one is published."""
    weights, published = state(size=SMALL), {}
    for version in range(versions[-1] + 1):
        if version in versions:
            publisher.publish_now(weights, version)
            written(folder, version)
            published[version] = weights
        weights = stepped(weights)
    return published


async def test_what_is_written_is_what_travels_directly(tmp_path: Path) -> None:
    """The same digests and differences; a late follower, one that goes on, and one that follows a follower."""
    publisher, weights = WeightPublisher(to=str(tmp_path / "run"), run_id="run"), state()
    async with AsyncExitStack() as stack:
        early = await follow(stack, str(tmp_path / "run"))
        assert early.newest is None
        direct = await follow(stack, (await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))).endpoint)
        behind = await follow(stack, early.endpoint)  # of a follower of the folder, which publishes on
        for version in range(3):
            await publisher.publish(weights, version)
            for follower in (early, direct, behind):
                await has(follower, version)
                assert holds(follower, weights)
                assert follower.newest is not None
                assert follower.newest.manifest.digest == publisher.digest
            weights = stepped(weights)
        assert early.bytes_received == direct.bytes_received == behind.bytes_received
        late = await follow(stack, f"file://{tmp_path}/run")
        await has(late, 2)
        assert late.bytes_received == early.bytes_received
        second = WeightPublisher()
        assert late.newest is not None
        second.publish_snapshot(late.newest.whole())
        publisher.close()
        with pytest.raises(CallRefusedError, match="belong to run 'run', not to 'other'; give both the same"):
            async with WeightFollower(state(), join=[str(tmp_path / "run")], run_id="other"):
                pass
    names = {path.name.partition(".")[2].rstrip("0123456789.") for path in (tmp_path / "run").iterdir()}
    assert names == {"json", "manifest", "whole", "difference"}, "no lease and no temporary file is left"


def test_a_way_is_the_shortest_that_has_all_bases() -> None:
    def entry(version: int, whole: int | None, difference: int | None, base: str = "") -> StoredVersion:
        sizes = {"whole": whole and (whole,), "difference": difference and (difference,)}
        return msgspec.structs.replace(StoredVersion(version, f"d{version}", base=base), **sizes)

    first, second = entry(1, 100, None), entry(2, None, 60, "d1")
    third, fourth = entry(3, 100, 60, "d2"), entry(4, None, 5, "d3")
    four = [first, second, third, fourth]

    def way(
        has: str, entries: Sequence[StoredVersion] = four, unusable: Collection[Step] = ()
    ) -> list[tuple[int, str]] | None:
        steps = route(entries, has, unusable)
        return None if steps is None else [(step.version, kind) for step, kind in steps]

    assert way("") == [(3, "whole"), (4, "difference")]
    assert way("d3") == [(4, "difference")]
    assert way("d2") == [(3, "difference"), (4, "difference")]
    assert way("d1") == [(3, "whole"), (4, "difference")], "two differences are longer than the anchor"
    assert way("d4") == []
    assert way("d2", [fourth]) is None
    assert way("d3", [fourth]) == [(4, "difference")], "the base need not be there any more"
    assert way("d2", unusable={(third, "whole"), (third, "difference")}) is None
    assert way("", unusable={(third, "whole")}) == [(1, "whole"), *((v, "difference") for v in (2, 3, 4))]
    assert way("", []) is None


async def test_old_versions_go_and_anchors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ANCHOR_EVERY", 3)
    publisher = WeightPublisher(to=str(tmp_path), keep=2)
    async with AsyncExitStack() as stack:
        published = await asyncio.to_thread(publish, publisher, tmp_path, range(2))
        stopped = ModelReceiver((await follow(stack, str(tmp_path)))._options)
        async with stopped:
            await has(stopped, 1)
        whole = stopped.bytes_received
        published |= await asyncio.to_thread(publish, publisher, tmp_path, range(2, 12))
        entries = index(tmp_path).versions
        assert [entry.version for entry in entries if entry.whole] == [6, 9]
        assert [entry.version for entry in entries] == [6, 7, 8, 9, 10, 11]
        assert names(tmp_path) == {entry.name for entry in entries}
        base = stopped.newest
        assert base is not None
        again = await stack.enter_async_context(ModelReceiver(stopped._options, base=base.whole()))
        await has(again, 11)
        assert holds(again, published[11])
        assert again.bytes_received < 1.2 * whole, "its difference was collected: an anchor, and what follows"
    publisher.close()


async def test_damaged_objects_never_become_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "ANCHOR_EVERY", 2)
    publisher = WeightPublisher(to=str(tmp_path))
    published = await asyncio.to_thread(publish, publisher, tmp_path, [1, 2, 3])
    publisher.close()
    first, second, third = index(tmp_path).versions
    assert [bool(entry.whole) for entry in (first, second, third)] == [True, False, True]
    anchor, difference = tmp_path / f"{third.name}.whole.0", tmp_path / f"{second.name}.difference.0"
    right = anchor.read_bytes(), difference.read_bytes()
    anchor.write_bytes(right[0][:-5])
    async with AsyncExitStack() as stack:
        other = await follow(stack, str(tmp_path))
        await has(other, 3)
        assert holds(other, published[3]), "by the way through the first anchor"
        assert f"{anchor.name}: it is cut off: {len(right[0]) - 5} of {len(right[0])} bytes" in caplog.text
        difference.write_bytes(right[1][:-5] + b"wrong")
        (tmp_path / f"{second.name}.manifest").rename(tmp_path / "hidden")
        without = await follow(stack, str(tmp_path))
        said = "does not have all that version 3 needs; trying again"
        await asyncio.to_thread(until, lambda: said in caplog.text)
        assert without.newest is None
        (tmp_path / "hidden").rename(tmp_path / f"{second.name}.manifest")
        difference.write_bytes(right[1])
        await has(without, 3)
        assert holds(without, published[3])


def test_training_goes_on_while_the_storage_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    away = tmp_path / "away"
    away.write_text("this is no folder")
    trained, mine = model(), model()
    publisher = WeightPublisher(trained, to=str(away / "run"))
    with averager(publisher, trained, LocalSGD(sync_every=1)) as optimizer:
        train(optimizer, trained, 3)
        until(lambda: f"{away}/run is not written to: [Errno 20] Not a directory" in caplog.text)
        assert optimizer.local_step == 3
        away.unlink()
        train(optimizer, trained, 3)
    assert caplog.text.count("is not written to") == 1, "each reason once"
    with WeightFollower(mine, join=[str(away / "run")], run_id="run") as follower:  # the averager has waited at its end
        assert follower.update(timeout=LIMIT)
        assert follower.version == 6
    assert same(mine.state_dict(), trained.state_dict())


def test_an_averager_in_client_mode_publishes_too(tmp_path: Path) -> None:
    founder, trained, mine = model(), model(), model()
    publisher = WeightPublisher(trained, to=str(tmp_path))
    with averager(WeightPublisher(founder), founder, LocalSGD(sync_every=1)) as other:
        options: dict[str, Any] = {"run_id": "run", "join": [other.endpoint], "mode": "client", "services": [publisher]}
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with DecentralizedAverager(optimizer, model=trained, strategy=LocalSGD(sync_every=1), **options):
            pass
    with WeightFollower(mine, join=[str(tmp_path)]) as follower:
        assert follower.update(timeout=LIMIT)
    assert same(mine.state_dict(), trained.state_dict())


def test_a_full_disk_is_named_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    publisher = WeightPublisher(to=str(tmp_path))
    published = publish(publisher, tmp_path, [1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        publisher.publish_now(state(1, SMALL), 2)
        until(lambda: f"{tmp_path} is not written to: [Errno 27] File too large" in caplog.text)
        with pytest.raises(StateError, match=r"the newest version was not written .*File too large"):
            publisher.close(timeout=0.1)
        assert [entry.version for entry in index(tmp_path).versions] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    publisher.publish_now(published[1], 3)
    written(tmp_path, 3)
    publisher.close()
    assert names(tmp_path) == {entry.name for entry in index(tmp_path).versions}
    assert not list(tmp_path.glob("*.tmp"))


def test_two_publishers_of_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second is refused, until the first is closed, or has not renewed its lease for long enough."""
    monkeypatch.setattr(storage, "RENEW_SECONDS", 0.05)
    first, second = WeightPublisher(to=str(tmp_path)), WeightPublisher(to=str(tmp_path))
    published = publish(first, tmp_path, [1])
    second.publish_now(published[1], 5)
    refused = f"another publisher writes to {tmp_path} .*; close it, or give one of them another folder"
    with pytest.raises(StateError, match=refused):
        second.close(timeout=0.2)
    lease = (tmp_path / "lease.json").read_bytes()
    until(lambda: (tmp_path / "lease.json").read_bytes() != lease)  # it is renewed
    assert [entry.version for entry in index(tmp_path).versions] == [1]
    first.close()
    second.publish_now(published[1], 6)
    written(tmp_path, 6)
    second.close()


def test_a_publisher_that_was_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "LEASE_SECONDS", 0.3)
    program = f"""
import time, torch
from averaging import WeightPublisher
publisher = WeightPublisher(to={str(tmp_path)!r}, run_id="run")
publisher.publish_now({{"w": torch.arange(8.0)}}, 5)
time.sleep(1000)"""
    with subprocess.Popen([sys.executable, "-c", program]) as killed:
        written(tmp_path, 5)
        killed.kill()
    (tmp_path / "9-0123456789abcdef.whole.0").write_bytes(b"begun, and never named by an index")
    publisher = WeightPublisher(to=str(tmp_path), run_id="run")
    publisher.publish_now({"w": torch.arange(8.0)}, 3)
    until(lambda: "has version 5" in caplog.text or not publisher._folder._waiting)  # type: ignore[union-attr]
    publisher.publish_now({"w": torch.arange(8.0) + 1}, 4)
    until(lambda: "has version 5, so version 4 is not written; give another folder, or empty it" in caplog.text)
    publisher.publish_now({"w": torch.arange(8.0) + 2}, 6)
    written(tmp_path, 6)
    assert "which does not renew it, is taken over" in caplog.text
    assert not list(tmp_path.glob("9-*"))
    publisher.close()
    other = WeightPublisher(to=str(tmp_path), run_id="other")
    other.publish_now({"w": torch.zeros(8)}, 7)
    with pytest.raises(StateError, match="has versions of run 'run'; give run 'other' another folder"):
        other.close(timeout=1.0)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Refuses the first request for each object with 503, and cuts the second answer off."""

    asked: dict[str, int]

    def do_GET(self) -> None:
        self.asked[self.path] = asked = self.asked.get(self.path, 0) + 1
        if asked == 1:
            self.send_error(503)
        elif asked == 2 and "whole" in self.path:
            data = Path(self.translate_path(self.path)).read_bytes()[:-9]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            super().do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        return


def test_a_web_server_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that knows no ranges, by a script and by the command, with answers that fail."""
    publisher, mine = WeightPublisher(to=str(tmp_path / "run")), state(1, SMALL)
    handler = functools.partial(type("Failing", (Handler,), {"asked": {}}), directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/run"
        published = publish(publisher, tmp_path / "run", [1, 2])
        with WeightFollower(mine, join=[url]) as follower:
            assert follower.update(timeout=LIMIT)
            assert follower.version == 2
            assert same(mine, published[2])
            last = stepped(published[2])
            publisher.publish_now(last, 3)
            assert follower.update(timeout=LIMIT)
            assert follower.digest == publisher.digest
        assert re.search("it is cut off: .* bytes; reading it again", caplog.text)
        assert "503" in caplog.text
        output = tmp_path / "now.safetensors"
        with averaging_process("follow", url, "--output", str(output), "--once", "--timeout", "20") as process:
            assert process.expect("written")["version"] == 3
            assert process.wait() == 0
        assert same(load_file(output), last)
        server.shutdown()
    publisher.close()


@contextmanager
def s3_server(port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.kill()


def test_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a real S3 server that comes late: publishing, a lease, following by a script and by the command."""
    import s3fs

    port = free_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "OBJECT_BYTES", 1 << 17)  # several objects
    monkeypatch.setattr(storage, "ANCHOR_EVERY", 2)
    publisher, mine, weights = WeightPublisher(to="s3://bucket/run", keep=1), state(1, SMALL), state(0, 4 * SMALL)
    publisher.publish_now(weights, 1)
    until(lambda: "s3://bucket/run is not written to" in caplog.text)
    with s3_server(port):
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        until(lambda: _made(files))
        mine = state(1, 4 * SMALL)
        with WeightFollower(mine, join=["s3://bucket/run"], join_timeout=60.0) as follower:
            for version in range(1, 6):
                if version > 1:
                    publisher.publish_now(weights, version)
                while follower.version != version:
                    assert follower.update(timeout=LIMIT)
                assert same(mine, weights)
                assert follower.digest == publisher.digest
                weights, last = stepped(weights), weights
        second = WeightPublisher(to="s3://bucket/run")
        second.publish_now(weights, 9)
        with pytest.raises(StateError, match="another publisher writes to s3://bucket/run"):
            second.close(timeout=2.0)
        publisher.close()
        files.invalidate_cache()
        kept = {Path(name).name.partition(".")[0].partition("-")[0] for name in files.ls("bucket/run")}
        assert kept == {"index", "5"}, "the older ones are removed, and the lease is released"
        output = tmp_path / "now.safetensors"
        with averaging_process("follow", "s3://bucket/run", "--output", str(output), "--once") as process:
            assert process.expect("written")["version"] == 5
        assert same(load_file(output), last)


def _made(files: Any) -> bool:
    try:
        files.mkdir("bucket")
    except OSError:
        return False
    return True


def test_a_step_of_fine_tuning_is_a_hundredth(tmp_path: Path) -> None:
    """AdamW with a learning rate of 1e-6 on gradients that are mostly noise, in bfloat16."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(0.02 * torch.randn(1 << 20))
    optimizer, publisher = (
        torch.optim.AdamW([weights], lr=1e-6),
        WeightPublisher(to=str(tmp_path), dtype=torch.bfloat16),
    )
    for step in range(41):
        weights.grad = torch.randn_like(weights)
        optimizer.step()
        if step >= 39:
            publisher.publish_now({"w": weights.detach()}, step)
            written(tmp_path, step)
    publisher.close()
    last = index(tmp_path).versions[-1]
    assert last.difference is not None
    assert sum(last.difference) <= 0.01 * 2 * weights.numel()


def test_what_cannot_be_published_or_followed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep must be a whole number, at least 1, not 0"):
        WeightPublisher(to=str(tmp_path), keep=0)
    with pytest.raises(ConfigError, match=r"Protocol not known: nothing; `pip install 'averaging\[storage\]'`"):
        WeightPublisher(to="nothing://run")
    with pytest.raises(ConfigError, match="nothing://run: Protocol not known"):
        WeightFollower(state(), join=["nothing://run"])
    with pytest.raises(ConfigError, match="without process_group"):
        WeightPublisher(to=str(tmp_path), process_group=object())
    (tmp_path / "index.json").write_text('{"versions": [{"version": -1}]}')
    with pytest.raises(StateError, match="index.json is damaged: Expected `int` >= 0"):
        WeightFollower(state(), join=[str(tmp_path)], join_timeout=0.5).__enter__()
