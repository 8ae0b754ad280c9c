"""The values of `join`, what a source answers, and what is said if it cannot be asked."""

import asyncio
import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from averaging.common.options import ADDRESSES_TO_DIAL
from averaging.common.seed_sources import SourceKind, parse_seed, split_seeds
from averaging.config import PeerConfig
from averaging.errors import ConfigError
from averaging.seeds import FoundSeeds, Seeds, expand_hostlist
from averaging.seeds.seeds import (
    MAX_CALLED,
    MAX_SEEDS,
    SeedsNotFoundError,
    own_addresses,
    read_seed_file,
    read_slurm_nodes,
)


@pytest.mark.parametrize(
    ("text", "kind", "name", "port", "members"),
    [
        ("dns:averaging.default.svc:4222", SourceKind.DNS, "averaging.default.svc", 4222, ()),
        ("file:/etc/seeds", SourceKind.FILE, "/etc/seeds", 0, ()),
        ("slurm:4222", SourceKind.SLURM, "", 4222, ()),
        ("etcd://a:2379/runs/gpt", SourceKind.ETCD, "runs/gpt", 0, ("a:2379",)),
        ("etcd://a:2379,[::1]:2380/gpt/", SourceKind.ETCD, "gpt", 0, ("a:2379", "[::1]:2380")),
    ],
)
def test_a_source_is_read(text: str, kind: SourceKind, name: str, port: int, members: tuple[str, ...]) -> None:
    source = parse_seed(text)
    assert source is not None
    assert (source.kind, source.name, source.port, source.members, str(source)) == (kind, name, port, members, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "dns:NAME:PORT"),
        ("a:0", "port 0"),
        ("dns:10.0.0.1:4222", "leave `dns:` out"),
        ("file:", "file:PATH"),
        ("etcd://a:2379", "etcd://HOST:PORT/KEY"),
    ],
)
def test_what_is_neither_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        PeerConfig(run_id="run", join=[text])


def test_a_variable_has_a_list() -> None:
    """The members of an etcd cluster have commas between them too."""
    assert split_seeds("a:1, dns:b:2 ,,etcd://c:3,d:4/key,file:x") == ["a:1", "dns:b:2", "etcd://c:3,d:4/key", "file:x"]
    assert ADDRESSES_TO_DIAL.parse("etcd://c:3/key") == ["etcd://c:3/key"]


def test_the_path_in_a_file_of_options_is_relative_to_it(tmp_path: Path) -> None:
    options = tmp_path / "peer.toml"
    options.write_text('run_id = "run"\njoin = ["file:seeds", "file:/etc/seeds", "a:1"]')
    config = PeerConfig.from_toml(options, environ={})
    assert config.join == [f"file:{tmp_path / 'seeds'}", "file:/etc/seeds", "a:1"]


# Lists of nodes of Slurm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b.example", ["a", "b.example"]),
        ("node[01-03,7],gpu", ["node01", "node02", "node03", "node7", "gpu"]),
        ("rack[0-1]node[8-10]-ib", [f"rack{r}node{n}-ib" for r in (0, 1) for n in (8, 9, 10)]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_a_list_of_nodes_is_expanded(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["", "a[", "a]1", "a[x]", "a[1", "a[1--2]", ",a", "a,", "a[]", "a[1][", "a[[1]]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="of Slurm"):
        expand_hostlist(text or ",")


@given(st.text("ab[]-,019", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert len(expand_hostlist(text)) <= MAX_SEEDS


def test_a_long_list_is_bounded() -> None:
    assert len(expand_hostlist("n[0-999999999]x[0-999999999]")) == MAX_SEEDS


def test_all_components_of_a_heterogeneous_job_are_there() -> None:
    one, other = "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1"
    assert read_slurm_nodes({"SLURM_JOB_NODELIST": "a[1-2]"}, 4222) == ["a1:4222", "a2:4222"]
    nodes = read_slurm_nodes({"SLURM_JOB_NODELIST": "a1", one: "a1", other: "b[1-2],a1"}, 4222)
    assert nodes == ["a1:4222", "b1:4222", "b2:4222"]


# Names and files


def resolving(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    def getaddrinfo(host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        named = addresses if host == "peers.example" else [host]
        return [(socket.AF_INET6 if ":" in name else socket.AF_INET, 1, 6, "", (name, port, 0, 0)) for name in named]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_has_all_its_addresses_without_this_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["10.0.0.6", "fd00::7", "10.0.0.5", "fe80::1%eth0"])
    told: list[FoundSeeds] = []
    seeds = Seeds(["dns:peers.example:4222"], on_found=told.append)
    seeds.bind("10.0.0.5:4222", "10.0.0.5:4222")
    asyncio.run(seeds.look_up())
    asyncio.run(seeds.look_up())
    assert seeds.addresses == ("10.0.0.6:4222", "[fd00::7]:4222", "[fe80::1%eth0]:4222")
    assert seeds.names["[fd00::7]:4222"] == "peers.example"
    (found,) = told  # the second answer is the same
    assert found.own == ("10.0.0.5:4222",)
    assert str(found) == (
        "dns:peers.example:4222 has 3 peers: 10.0.0.6:4222, [fd00::7]:4222, [fe80::1%eth0]:4222; "
        "10.0.0.5:4222 is this peer's"
    )


def test_a_file_has_a_line_for_each_peer(tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_text("# those of the first site\na.example:4222  # the first\n\n [fd00::7]:4222\n")
    assert read_seed_file(str(path)) == ["a.example:4222", "[fd00::7]:4222"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"a:1\nb\n", "line 2 .* no address"),
        (b"a:0\n", "line 1 .* no address"),
        (b"client::x\n", "line 1 .* no address"),
        (b"\xff\xfe\n", "is not text"),
        (b"a:1\n" * 300_000, "more than"),
    ],
)
def test_a_file_without_addresses_names_the_remedy(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_bytes(content)
    with pytest.raises(SeedsNotFoundError, match=f"(?s){words}.*one HOST:PORT a line"):
        read_seed_file(str(path))


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SeedsNotFoundError, match="is no file"):
            read_seed_file(str(path))


def test_of_many_addresses_each_peer_calls_others(tmp_path: Path) -> None:
    """All peers of a large run would otherwise call all others at their start."""
    path = tmp_path / "seeds"
    path.write_text("".join(f"host-{number}:1\n" for number in range(500)))
    chosen = []
    for _ in range(2):
        seeds = Seeds([f"file:{path}"])
        asyncio.run(seeds.look_up())
        chosen.append(seeds.addresses)
        asyncio.run(seeds.look_up())
        assert seeds.addresses == chosen[-1]
    assert [len(set(addresses)) for addresses in chosen] == [MAX_CALLED, MAX_CALLED]
    assert chosen[0] != chosen[1]


def test_a_file_that_fails_keeps_what_it_named(tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_text("a.example:4222")
    seeds = Seeds([f"file:{path}", "b.example:1"])
    asyncio.run(seeds.look_up())
    path.unlink()
    asyncio.run(seeds.look_up())
    assert list(seeds.addresses) == ["b.example:1", "a.example:4222"]
    assert "cannot be read" in seeds.failures[f"file:{path}"]


# This peer's own addresses


@pytest.mark.parametrize(
    ("endpoint", "listen", "own"),
    [
        ("127.0.0.1:1", "127.0.0.1:1", ["127.0.0.1:1", "localhost:1"]),
        ("127.0.0.2:1", "127.0.0.2:1", ["127.0.0.2:1"]),
        ("a.invalid:1", "0.0.0.0:1", ["127.0.0.1:1", "localhost:1", "127.0.0.2:1", "a.invalid:1"]),
        ("192.0.2.7:2", "0.0.0.0:1", ["127.0.0.1:1", "localhost:1", "127.0.0.2:1", "192.0.2.7:2"]),
    ],
)
def test_where_this_peer_listens(endpoint: str, listen: str, own: list[str]) -> None:
    """Another peer of this machine may have the same port on another address, or another port."""
    candidates = [
        "127.0.0.1:1",
        "localhost:1",
        "127.0.0.2:1",
        "127.0.0.1:3",
        "a.invalid:1",
        "192.0.2.7:2",
        "192.0.2.7:1",
    ]
    assert list(own_addresses(candidates, endpoint, listen)) == own


def test_the_node_of_slurm_is_own_by_its_name() -> None:
    assert own_addresses(["n1.invalid:1", "n2.invalid:1"], "192.0.2.7:1", "0.0.0.0:1", "n1.invalid") == (
        "n1.invalid:1",
    )
