"""What `averaging doctor` says about a peer to join: each fault under its own name, with real peers and sockets."""

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from averaging import Peer, PeerConfig
from averaging.doctor import Severity, connections, other_peer
from averaging.errors import PeerUnreachableError
from averaging.peer import PeerContext
from averaging.probe import ECHO, SOFTWARE
from averaging.rpc import RpcChannel, RpcMethod
from averaging.security.credentials import issue, make_authority
from averaging.seeds.seeds import EtcdSeeds
from averaging.tensors import Schema, describe
from tests.doctor.doctors import about, examined, wrong
from tests.support.certificates import NOW, stored, token_file, write
from tests.support.ports import free_address, free_port
from tests.transport.test_proxies import NAME, connecting

TOKEN, OTHER_TOKEN = "0123456789abcdef", "fedcba9876543210"
MODEL = {"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(4)}

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def token(directory: Path, text: str) -> dict[str, Any]:
    (directory / text).mkdir()
    return {"token_file": token_file(directory / text, text)}


def schema(model: Mapping[str, torch.Tensor] = MODEL) -> Schema:
    return describe(tuple(model), tuple(model.values()), part_size_bytes=1 << 20)


async def test_all_is_well_between_two_that_fit(tmp_path: Path) -> None:
    options: dict[str, Any] = {**write(tmp_path, "localhost", "127.0.0.1"), **token(tmp_path, TOKEN)}
    async with Peer(MODEL, run_id="run", listen="localhost:0", **options) as peer:
        found = await examined(peer.endpoint, schema=schema(), listen=free_address(), **options)
    assert wrong(found) == {}
    assert [each.check for each in found if each.peer] == [
        *("addresses", "tcp", "tls", "call", "run", "software", "endpoint", "clock-difference"),
        *("call-back", "options", "schema"),
    ]
    assert [str(each) for each in found if each.peer and each.severity is not Severity.OK] == []
    texts = " ".join(each.text for each in found)
    assert "TLSv1.3" in texts
    assert f"{SOFTWARE}, as here" in texts
    assert "the peer reaches 127.0.0.1" in texts


@pytest.mark.parametrize(
    ("ours", "says"), [({}, "this peer has none: give token_file"), (OTHER_TOKEN, "does not accept this peer's token")]
)
async def test_a_token_that_is_missing_or_wrong(ours: Any, says: str, tmp_path: Path) -> None:
    async with Peer(MODEL, run_id="run", **token(tmp_path, TOKEN)) as peer:
        found = await examined(peer.endpoint, **(token(tmp_path, ours) if ours else {}))
    assert list(wrong(found)) == ["call"]
    assert says in wrong(found)["call"]
    assert about(found, "run") == []  # nothing else is told to strangers


async def test_another_run_is_named_and_calls_nobody_back() -> None:
    async with Peer(MODEL, run_id="theirs") as peer:
        found = await examined(peer.endpoint, run_id="ours")
        unknown = await examined(peer.endpoint, run_known=False)
    assert "another run" in wrong(found)["run"]
    assert "'theirs'" in wrong(found)["run"]
    assert "another run" in about(found, "call-back")[0].text
    assert wrong(unknown) == {}
    [run] = about(unknown, "run")
    assert run.severity is Severity.WARNING
    assert "'theirs'" in run.text


async def test_an_expired_certificate_of_either_side(tmp_path: Path) -> None:
    old = make_authority("run", NOW.replace(year=NOW.year - 1), 3000)
    ages = {"old": NOW.replace(year=NOW.year - 1), "new": NOW}
    files: dict[str, Any] = {
        name: stored(tmp_path / name, old, issue(old, "peer", ("127.0.0.1",), start, 5)) for name, start in ages.items()
    }
    expired = ages["old"].timestamp() + 86400
    async with Peer(MODEL, run_id="run", context=PeerContext(clock=lambda: expired), **files["old"]) as peer:
        found = await examined(peer.endpoint, **files["new"])
    assert "refused here: certificate has expired → there, issue another" in wrong(found)["tls"]
    async with Peer(MODEL, run_id="run", **files["new"]) as peer:
        found = await examined(peer.endpoint, **files["old"])
    assert "expired" in wrong(found)["certificate"]
    assert "it refuses the certificate of this one: by its clock the certificate has expired" in wrong(found)["tls"]


async def test_a_certificate_for_another_name_and_of_another_authority(tmp_path: Path) -> None:
    for directory in ("a", "b", "c"):
        (tmp_path / directory).mkdir()
    ours: dict[str, Any] = write(tmp_path / "a", "127.0.0.1")
    theirs: dict[str, Any] = write(tmp_path / "b", "localhost")
    async with Peer(MODEL, run_id="run", listen="localhost:0", **theirs) as peer:
        port = peer.endpoint.rpartition(":")[2]
        found = await examined(f"127.0.0.1:{port}", **ours)
    assert "certificate is not valid for '127.0.0.1'" in wrong(found)["tls"]
    assert "for 127.0.0.1, or join it at a name that its certificate has" in wrong(found)["tls"]
    strange: dict[str, Any] = write(tmp_path / "c", "127.0.0.1", of="another")
    async with Peer(MODEL, run_id="run", **strange) as peer:
        found = await examined(peer.endpoint, **ours)
        mixed = {**strange, "tls_ca": ours["tls_ca"]}
        own = await examined(peer.endpoint, **mixed)
    assert "give the ca.pem of that run as tls_ca" in wrong(found)["tls"]
    assert "was not issued by an authority" in wrong(own)["certificate"]


async def test_tls_on_one_side_only(tmp_path: Path) -> None:
    files: dict[str, Any] = write(tmp_path, "127.0.0.1")
    async with Peer(MODEL, run_id="run", **files) as peer:
        found = await examined(peer.endpoint)
    assert "the peer speaks TLS, and this one has no certificate" in wrong(found)["tls"]
    async with Peer(MODEL, run_id="run") as peer:
        found = await examined(peer.endpoint, **files)
    assert "the peer speaks no TLS" in wrong(found)["tls"]


async def test_a_closed_port_and_an_unknown_host() -> None:
    found = await examined(free_address(), "nobody.invalid:4222")
    closed, unknown = [each for each in found if each.peer and each.severity is Severity.FAILURE]
    assert (closed.check, unknown.check) == ("tcp", "addresses")
    assert "connection refused" in closed.text
    assert "unknown host" in unknown.text


async def test_a_schema_that_differs_is_named() -> None:
    other = {"layer.weight": torch.ones(3, 5), "layer.bias": torch.ones(4), "head": torch.ones(2)}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Peer(MODEL, run_id="run"))
        second = await stack.enter_async_context(Peer(other, run_id="run"))
        found = await examined(first.endpoint, schema=schema(other))
        between = await examined(first.endpoint, second.endpoint)
        pair = f"between {first.endpoint} (here) and {second.endpoint} (there): 1 tensor only there"
    assert "1 tensor only here, such as 'head'" in wrong(found)["schema"]
    assert pair in wrong(between)["schema"]


async def test_options_that_must_be_the_same_are_named() -> None:
    async with Peer(MODEL, run_id="run", aggregation="median", min_group_size=3) as peer:
        found = await examined(peer.endpoint)
    expected = "min_group_size is 2 here and 3 there; aggregation is mean here and median there"
    assert expected in wrong(found)["options"]


async def test_something_else_than_a_peer_listens() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        found = await examined(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert list(wrong(found)) == ["call"]


async def test_the_clock_of_the_peer_is_compared() -> None:
    async with Peer(MODEL, run_id="run", context=PeerContext(clock=lambda: time.time() + 40)) as peer:
        told = wrong(await examined(peer.endpoint))["clock-difference"]
    measured = re.search(r"is (\d+) ms ahead of this one \(± ([\d.]+) ms\)", told)
    assert measured, told
    ahead, bound = map(float, measured.groups())
    assert abs(ahead - 40_000) <= bound + 1.0, told  # both are rounded


async def test_a_standstill_between_two_readings_of_the_clocks_is_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clocks are equal, and the second reading before each call is 20 s after the first."""
    moment, passing = [1e9], cycle([0.0, 20.0, 0.0])

    def read() -> float:
        moment[0] += next(passing)
        return moment[0]

    async def call(*_: object) -> SimpleNamespace:
        return SimpleNamespace(time=moment[0])

    monkeypatch.setattr(other_peer, "time", SimpleNamespace(time=read, monotonic=read))
    peer = cast(Any, SimpleNamespace(call=call, description="known", round_trips=[]))
    answer = await other_peer.ask_clock(peer)
    assert answer is not None
    finding = other_peer.judge_clock(peer, answer)
    assert finding.severity is not Severity.FAILURE, finding.text


async def test_etcd_is_read_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []

    async def read(_: EtcdSeeds) -> list[str]:
        return listed

    async def publish(_: EtcdSeeds, endpoint: str) -> None:
        raise AssertionError(endpoint)

    monkeypatch.setattr(EtcdSeeds, "read", read)
    monkeypatch.setattr(EtcdSeeds, "publish", publish)
    async with Peer(MODEL, run_id="run") as peer:
        endpoint = peer.endpoint
        listed.append(endpoint)
        found = await examined("etcd://127.0.0.1:2379/run", listen=free_address())
    assert about(found, "schema", endpoint)[0].severity is Severity.OK
    assert {each.peer for each in found} == {"", endpoint}
    assert endpoint in about(found, "join")[0].text


async def test_a_peer_behind_a_proxy_is_asked_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine knows no address of its name."""
    port = free_port()
    files: Any = write(tmp_path, NAME, "127.0.0.1")
    async with (
        connecting() as (proxy, seen),
        Peer(MODEL, run_id="run", listen=f"127.0.0.1:{port}", advertise=f"{NAME}:{port}", **files),
    ):
        monkeypatch.setenv("AVERAGING_PROXY", f"http://{proxy}")
        found = await examined(f"{NAME}:{port}", mode="client", **files)
    assert wrong(found) == {}
    assert proxy in about(found, "tcp")[0].text
    assert about(found, "schema")[0].severity is Severity.OK
    assert {request.split()[1] for request in seen} == {f"{NAME}:{port}"}


async def test_all_is_measured_at_a_real_peer() -> None:
    async with Peer(MODEL, run_id="run") as peer:
        found = await examined(peer.endpoint, deep=True)
    [round_trip], [bandwidth] = about(found, "round-trip"), about(found, "bandwidth")
    assert (round_trip.severity, bandwidth.severity) == (Severity.OK, Severity.OK)
    assert all(value > 0 for each in (round_trip, bandwidth) for value in each.figures.values())
    assert {*bandwidth.figures} == {"to_peer_bytes_per_second", "from_peer_bytes_per_second"}


async def test_large_packets_that_vanish_are_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls are answered, and what fills packets is lost."""
    answered = RpcChannel.call

    async def call(self: RpcChannel, method: RpcMethod[Any, Any], request: Any, timeout: float) -> Any:
        if method is ECHO:
            raise PeerUnreachableError(self.endpoint, f"no answer within {timeout:g} s")
        return await answered(self, method, request, timeout)

    monkeypatch.setattr(RpcChannel, "call", call)
    async with Peer(MODEL, run_id="run") as peer:
        told = wrong(await examined(peer.endpoint, deep=True))
    assert list(told) == ["bandwidth"]
    assert "64.0 KiB do not pass within 20 s: large packets vanish" in told["bandwidth"]
    assert "mtu 1280" in told["bandwidth"]


@pytest.mark.parametrize("small_pass", [True, False])
async def test_a_handshake_that_hangs_is_tried_with_small_packets(
    small_pass: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer answers if the largest segment of the connection is small, as over a path that loses large packets."""
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 1.0)
    files: dict[str, Any] = write(tmp_path, "127.0.0.1")
    context = connections.server_context(PeerConfig(run_id="run", **files))

    served: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(cast("asyncio.Task[Any]", asyncio.current_task()))
        segment = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        with suppress(OSError):  # the caller ends the connection
            if small_pass and segment < 1280:
                await writer.start_tls(cast(ssl.SSLContext, context))
                writer.write(bytes(9))
            await reader.read()
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = wrong(await examined(f"127.0.0.1:{port}", **files))["tls"]
        await asyncio.wait(served)
    assert ("packets of 1,280 bytes pass, and larger ones vanish" in told) is small_pass
    assert ("mtu 1280" in told) is small_pass
    assert ("it does not answer during the TLS handshake" in told) is not small_pass


def test_the_options_that_must_be_the_same_are_those_whose_help_says_so() -> None:
    from averaging.config import OPTIONS

    told = {name for name, declared in OPTIONS.items() if "same at all peers" in declared.help}
    assert {name for name, declared in OPTIONS.items() if declared.alike} == told
    assert len(told) >= 5
