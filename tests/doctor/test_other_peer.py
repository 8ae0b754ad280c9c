"""What `averaging doctor` says about a peer to join: each fault under its own name, with real peers and sockets."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from averaging import Peer
from averaging.doctor import SOFTWARE, Severity, other_peer
from averaging.doctor.other_peer import NOT_ASKED
from averaging.receipts import TrainingProgress
from averaging.security.ca import issue, make_authority
from averaging.seeds.etcd import EtcdSeeds
from averaging.tensors import Schema, describe
from tests.support.certificates import NOW, authority, stored, write
from tests.support.doctors import about, examined, wrong
from tests.support.ports import free_address, free_port
from tests.transport.test_proxies import NAME, connecting

TOKEN, OTHER_TOKEN = "0123456789abcdef", "fedcba9876543210"
MODEL = {"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(4)}

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def token(directory: Path, text: str) -> dict[str, Any]:
    path = directory / text
    path.touch(mode=0o600)
    path.write_text(text)
    return {"token_file": path}


def schema(model: Mapping[str, torch.Tensor] = MODEL) -> Schema:
    return describe(tuple(model), tuple(model.values()), part_size_bytes=1 << 20)


@pytest.mark.asyncio
async def test_all_is_well_between_two_that_fit(tmp_path: Path) -> None:
    options: dict[str, Any] = {**write(tmp_path, "localhost", "127.0.0.1"), **token(tmp_path, TOKEN)}
    async with Peer(MODEL, run_id="run", listen="localhost:0", **options) as peer:
        found = await examined(peer.endpoint, schema=schema(), listen=free_address(), **options)
    assert wrong(found) == {}
    assert [each.check for each in found if each.peer] == [
        *("addresses", "tcp", "tls", "token", "run", "software", "endpoint", "clock-difference"),
        *("call-back", "options", "schema"),
    ]
    assert [str(each) for each in found if each.peer and each.severity is not Severity.OK] == []
    texts = " ".join(each.text for each in found)
    assert "TLSv1.3" in texts
    assert f"{SOFTWARE}, as here" in texts
    assert "the peer reaches 127.0.0.1" in texts


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ours", "says"),
    [({}, "this peer has none: give token_file"), (OTHER_TOKEN, "does not accept this peer's token")],
)
async def test_a_token_that_is_missing_or_wrong(ours: Any, says: str, tmp_path: Path) -> None:
    async with Peer(MODEL, run_id="run", **token(tmp_path, TOKEN)) as peer:
        found = await examined(peer.endpoint, **(token(tmp_path, ours) if ours else {}))
    assert list(wrong(found)) == ["token"]
    assert says in wrong(found)["token"].replace(" → ", ": ")
    assert about(found, "run") == []  # nothing else is told to strangers


@pytest.mark.asyncio
async def test_another_run_is_named_and_calls_nobody_back() -> None:
    async with Peer(MODEL, run_id="theirs") as peer:
        found = await examined(peer.endpoint, run_id="ours")
        unknown = await examined(peer.endpoint, run_known=False)
    assert "another run" in wrong(found)["run"]
    assert "'theirs'" in wrong(found)["run"]
    assert "another run" in about(found, "call-back")[0].text
    [run] = about(unknown, "run")
    assert run.severity is Severity.WARNING
    assert "'theirs'" in run.text


@pytest.mark.asyncio
async def test_an_expired_certificate_of_either_side(tmp_path: Path) -> None:
    old = make_authority("run", NOW.replace(year=NOW.year - 1), 3000)
    ages = {"old": NOW.replace(year=NOW.year - 1), "new": NOW}
    files: dict[str, Any] = {
        name: stored(tmp_path / name, old, issue(old, "peer", ("127.0.0.1",), start, 5)) for name, start in ages.items()
    }
    expired = ages["old"].timestamp() + 86400
    async with Peer(MODEL, run_id="run", clock=lambda: expired, **files["old"]) as peer:
        found = await examined(peer.endpoint, **files["new"])
    assert "expired certificate: that of the peer expired on" in wrong(found)["tls"]
    async with Peer(MODEL, run_id="run", **files["new"]) as peer:
        found = await examined(peer.endpoint, **files["old"])
    assert "expired" in wrong(found)["certificate"]
    assert "it refuses the certificate of this one: by its clock the certificate has expired" in wrong(found)["tls"]
    assert "no call was made" in about(found, "call")[0].text


@pytest.mark.asyncio
async def test_a_certificate_for_another_name_and_of_another_authority(tmp_path: Path) -> None:
    for directory in ("a", "b", "c"):
        (tmp_path / directory).mkdir()
    ours: dict[str, Any] = write(tmp_path / "a", "127.0.0.1")
    theirs: dict[str, Any] = write(tmp_path / "b", "localhost")
    async with Peer(MODEL, run_id="run", listen="localhost:0", **theirs) as peer:
        port = peer.endpoint.rpartition(":")[2]
        found = await examined(f"127.0.0.1:{port}", **ours)
    assert "wrong name: the certificate of the peer is not for 127.0.0.1 (it is for localhost)" in wrong(found)["tls"]
    strange: dict[str, Any] = write(tmp_path / "c", "127.0.0.1", of="another")
    async with Peer(MODEL, run_id="run", **strange) as peer:
        found = await examined(peer.endpoint, **ours)
        mixed = {**strange, "tls_ca": ours["tls_ca"]}
        own = await examined(peer.endpoint, **mixed)
    assert "unknown authority" in wrong(found)["tls"]
    assert "was not issued by an authority" in wrong(own)["certificate"]


@pytest.mark.asyncio
async def test_a_peer_refuses_an_authority_that_it_does_not_know(tmp_path: Path) -> None:
    """This side trusts both authorities, the peer trusts one."""
    ours: dict[str, Any] = write(tmp_path / "a", "127.0.0.1", of="another")
    both = tmp_path / "both.pem"
    both.write_bytes(authority("run").certificate + authority("another").certificate)
    theirs: dict[str, Any] = write(tmp_path / "b", "127.0.0.1")
    async with Peer(MODEL, run_id="run", **theirs) as peer:
        found = await examined(peer.endpoint, **ours | {"tls_ca": both})
    assert "its authority is unknown there" in wrong(found)["tls"]


@pytest.mark.asyncio
async def test_tls_on_one_side_only(tmp_path: Path) -> None:
    files: dict[str, Any] = write(tmp_path, "127.0.0.1")
    async with Peer(MODEL, run_id="run", **files) as peer:
        found = await examined(peer.endpoint)
    assert "the peer speaks TLS, and this one has no certificate" in wrong(found)["tls"]
    async with Peer(MODEL, run_id="run") as peer:
        found = await examined(peer.endpoint, **files)
    assert "the peer speaks no TLS" in wrong(found)["tls"]


@pytest.mark.asyncio
async def test_a_closed_port_and_an_unknown_host() -> None:
    found = await examined(free_address(), "nobody.invalid:4222")
    closed, unknown = [each for each in found if each.peer and each.severity is Severity.FAILURE]
    assert (closed.check, unknown.check) == ("tcp", "addresses")
    assert "connection refused" in closed.text
    assert "unknown host" in unknown.text


@pytest.mark.asyncio
async def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with an address at which nobody listens, and one at which the peer does; gRPC's own look-up fails."""
    monkeypatch.setattr("averaging.doctor.other_peer.CALL_SECONDS", 2.0)
    async with Peer(MODEL, run_id="run") as peer:
        port = int(peer.endpoint.rpartition(":")[2])
        real = socket.getaddrinfo

        def both(host: Any, *rest: Any, **more: Any) -> Any:
            if host == "two.example.org":
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("127.0.0.9", "127.0.0.1")]
            return real(host, *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", both)
        found = await examined(f"two.example.org:{port}")
    assert about(found, "addresses")[0].text == "two.example.org is 127.0.0.9, 127.0.0.1"
    refused, connected = about(found, "tcp")
    assert (refused.severity, connected.severity) == (Severity.WARNING, Severity.OK)
    assert "127.0.0.9" in refused.text
    assert "gRPC does not find the name" in wrong(found)["call"]
    assert "join it at its IP address" in wrong(found)["call"]
    assert about(found, "schema")[0].severity is Severity.OK  # the rest is asked at the address


@pytest.mark.asyncio
async def test_a_schema_that_differs_is_named() -> None:
    other = {"layer.weight": torch.ones(3, 5), "layer.bias": torch.ones(4), "head": torch.ones(2)}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Peer(MODEL, run_id="run"))
        second = await stack.enter_async_context(Peer(other, run_id="run"))
        found = await examined(first.endpoint, schema=schema(other))
        between = await examined(first.endpoint, second.endpoint)
        pair = f"between {first.endpoint} (here) and {second.endpoint} (there): tensor"
    assert (
        "tensor 'layer.weight' is float32[3, 5] as NONE here and float32[3, 4] as NONE there" in wrong(found)["schema"]
    )
    assert pair in wrong(between)["schema"]


@pytest.mark.asyncio
async def test_options_that_must_be_the_same_are_named() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Peer(MODEL, run_id="run", aggregation="median", min_group_size=3))
        second = await stack.enter_async_context(Peer(MODEL, run_id="run"))
        found = await examined(first.endpoint)
        between = await examined(first.endpoint, second.endpoint, aggregation="median", min_group_size=3)
        options, at = about(between, "options", second.endpoint), f"at {first.endpoint}"
    expected = "min_group_size is 2 here and 3 there; aggregation is mean here and median there"
    assert expected in wrong(found)["options"]
    assert [each.severity for each in options] == [Severity.FAILURE] * 2
    assert f"min_group_size is 3 {at} and 2 there" in options[1].text


@pytest.mark.asyncio
async def test_a_peer_without_the_service_cannot_be_asked() -> None:
    async with Peer(MODEL, run_id="run", inspection="off") as peer:
        found = await examined(peer.endpoint)
    assert wrong(found) == {}
    assert {each.check for each in found if NOT_ASKED in each.text} == {"run", "probe", "schema"}


@pytest.mark.asyncio
async def test_something_else_than_a_peer_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.doctor.tls.HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr("averaging.doctor.other_peer.CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = await examined(f"127.0.0.1:{server.getsockname()[1]}")
    assert "tcp" not in wrong(found)
    assert "call" in wrong(found)


@pytest.mark.asyncio
async def test_the_clock_of_the_peer_is_compared() -> None:
    async with Peer(MODEL, run_id="run", clock=lambda: time.time() + 40) as peer:
        told = wrong(await examined(peer.endpoint))["clock-difference"]
    measured = re.search(r"is (\d+) ms ahead of this one \(± ([\d.]+) ms\)", told)
    assert measured, told
    ahead, bound = map(float, measured.groups())
    assert abs(ahead - 40_000) <= bound + 1.0, told  # both are rounded


@pytest.mark.asyncio
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
    finding = await other_peer._check_clocks(cast(Any, SimpleNamespace(call=call, seed="peer:1")))
    assert finding.severity is not Severity.FAILURE, finding.text


@pytest.mark.asyncio
async def test_the_port_of_a_peer_of_the_run_is_taken_by_it() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with Peer(MODEL, run_id="run") as seed, Peer(MODEL, run_id="run", listen=address, join=[seed.endpoint]):
        found = await examined(seed.endpoint, listen=address)
        strange = await examined(seed.endpoint, listen=address, run_id="other")
    assert wrong(found) == {}
    assert "is up at" in about(found, "port")[0].text
    assert "where something listens already" in about(found, "call-back")[0].text
    assert "the port is taken" in wrong(strange)["port"]


@pytest.mark.asyncio
async def test_a_source_of_seeds_is_asked_and_says_what_it_has(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    async with Peer(MODEL, run_id="run") as peer:
        endpoint = peer.endpoint
        seeds.write_text(f"{endpoint}\n")
        found = await examined(f"file:{seeds}")
        missing = await examined(f"file:{tmp_path / 'none'}")
    assert endpoint in about(found, "join")[0].text
    assert about(found, "schema", endpoint)[0].severity is Severity.OK
    assert "none" in wrong(missing)["join"]


@pytest.mark.asyncio
async def test_etcd_is_read_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have written there is dialled only where a peer can be."""
    listed: list[str] = []

    async def read(_: EtcdSeeds) -> list[str]:
        return listed

    async def publish(_: EtcdSeeds, endpoint: str) -> None:
        raise AssertionError(endpoint)

    monkeypatch.setattr(EtcdSeeds, "read", read)
    monkeypatch.setattr(EtcdSeeds, "publish", publish)
    async with Peer(MODEL, run_id="run") as peer:
        endpoint = peer.endpoint
        listed += [endpoint, "169.254.169.254:80"]
        found = await examined("etcd://127.0.0.1:2379/run", listen=free_address())
    assert about(found, "schema", endpoint)[0].severity is Severity.OK
    assert {each.peer for each in found} == {"", endpoint}
    assert "metadata services" in about(found, "join")[1].text


@pytest.mark.asyncio
async def test_a_peer_behind_a_proxy_is_asked_through_it(tmp_path: Path) -> None:
    """This machine knows no address of its name."""
    port = free_port()
    files: Any = write(tmp_path, NAME, "127.0.0.1")
    async with (
        connecting() as (proxy, seen),
        Peer(MODEL, run_id="run", listen=f"127.0.0.1:{port}", advertise=f"{NAME}:{port}", **files),
    ):
        found = await examined(f"{NAME}:{port}", mode="client", proxy=f"http://{proxy}", **files)
    assert wrong(found) == {}
    assert proxy in about(found, "tcp")[0].text
    assert about(found, "schema")[0].severity is Severity.OK
    assert {request.split()[1] for request in seen} == {f"{NAME}:{port}"}


@pytest.mark.asyncio
async def test_a_client_needs_no_port() -> None:
    async with Peer(MODEL, run_id="run") as peer:
        found = await examined(peer.endpoint, mode="client")
    assert wrong(found) == {}
    assert "not needed" in about(found, "call-back")[0].text


@pytest.mark.asyncio
async def test_the_strategies_are_compared() -> None:
    def training(strategy: str) -> Any:
        return lambda: TrainingProgress(strategy, "training", 3, None)

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Peer(MODEL, run_id="run", training=training("DiLoCo")))
        second = await stack.enter_async_context(Peer(MODEL, run_id="run", training=training("LocalSGD")))
        third = await stack.enter_async_context(Peer(MODEL, run_id="run", training=training("Mine")))
        found = await examined(first.endpoint, strategy="diloco")
        between = await examined(first.endpoint, second.endpoint)
        own = await examined(third.endpoint, strategy="diloco")
    assert about(found, "strategy")[0].text == "the peer trains with DiLoCo, as here"
    assert "and LocalSGD there" in wrong(between)["strategy"]
    assert about(own, "strategy")[0].severity is Severity.WARNING


def test_the_options_that_must_be_the_same_are_those_whose_help_says_so() -> None:
    from averaging.config import OPTIONS

    told = {name for name, declared in OPTIONS.items() if "same at all peers" in declared.help}
    assert {name for name, declared in OPTIONS.items() if declared.alike} == told
    assert len(told) >= 6
