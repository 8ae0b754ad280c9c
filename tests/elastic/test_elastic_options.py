"""What torchrun hands over, and silent nodes."""

from typing import Any

import pytest

from averaging.elastic.handler import Silence
from averaging.elastic.options import read_options
from averaging.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "endpoints"),
    [
        ("", ("localhost:29400",)),
        ("localhost", ("localhost:29400",)),
        ("127.0.0.1:1", ("127.0.0.1:1",)),
        ("[::1]:1", ("[::1]:1",)),
        ("::1", ("[::1]:29400",)),
        ("etcd://127.0.0.1,localhost:1", ("127.0.0.1:2379", "localhost:1")),
    ],
)
def test_endpoints(endpoint: str, endpoints: tuple[str, ...]) -> None:
    options = read_options(endpoint, {}, 2)
    assert options.endpoints == endpoints
    assert options.etcd == endpoint.startswith("etcd")


@pytest.mark.parametrize(
    ("endpoint", "conf", "told"),
    [
        ("a:b:c", {}, "--rdzv-endpoint"),
        ("http://a:1", {}, "HOST:PORT of a register"),
        ("localhost:0", {}, "port 0"),
        ("localhost:1", {"tls_cert": "x"}, "tls_ca and --rdzv-conf=tls_key as well"),
        ("localhost:1", {"token": "x"}, "did you mean token_file"),
        ("localhost:1", {"join_timeout": "soon"}, "join_timeout must be a whole number"),
        ("localhost:1", {"keep_alive_interval": "0"}, "of at least 1, not 0"),
        ("localhost:1", {"insecure": "perhaps"}, "--rdzv-conf=insecure must be True or False"),
        ("192.0.2.7:1", {}, "others could take the job over"),
        ("0.0.0.0:1", {"insecure": "true"}, "every address of each node"),
        ("192.0.2.7:1", {"token_file": "t"}, "insecure=true"),
        ("etcd://127.0.0.1", {"is_host": "1"}, "the cluster keeps the register"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(endpoint: str, conf: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_options(endpoint, conf, 2)


@pytest.mark.parametrize(
    ("given", "addr", "port", "endpoint"),
    [
        ("", "127.0.0.1", "29500", "127.0.0.1:29500"),
        ("", "localhost", "", "localhost:29500"),
        ("", "[::1]", "1", "[::1]:1"),
        ("", "", "1", "localhost:29400"),
        ("127.0.0.1:1", "a.site", "2", "127.0.0.1:1"),
    ],
)
def test_the_variables_of_a_launcher_count_where_no_endpoint_is_given(
    given: str, addr: str, port: str, endpoint: str
) -> None:
    variables = {"PET_MASTER_ADDR": addr, "PET_MASTER_PORT": port, "PET_NODE_RANK": "7"}
    options = read_options(given, {}, 2, variables)
    assert options.endpoints == (endpoint,)
    assert options.awaits_name is (not given and bool(addr))


@pytest.mark.parametrize(
    ("addr", "port", "told"),
    [
        ("a.site", "many", "PET_MASTER_ADDR:PET_MASTER_PORT: "),
        ("a.site:5", "1", "PET_MASTER_ADDR 'a.site:5' must be a name or an address; the port is PET_MASTER_PORT"),
        ("a.site", "1", "PET_MASTER_ADDR:PET_MASTER_PORT a.site:1 is reached over the network"),
    ],
)
def test_a_wrong_variable_is_named(addr: str, port: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_options("", {}, 2, {"PET_MASTER_ADDR": addr, "PET_MASTER_PORT": port})


def test_a_node_is_silent_when_its_heartbeat_stays_the_same() -> None:
    silence: Silence[str] = Silence(5.0, 15.0)
    for now in range(0, 60, 5):
        assert silence.silent({"a": now, "b": min(now, 20)}, float(now)) == (["b"] if now > 35 else [])


def test_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    """This node was stopped, or the register was away, for a minute."""
    silence: Silence[str] = Silence(5.0, 15.0)
    silence.silent({"a": 0}, 0.0)
    assert silence.silent({"a": 0}, 60.0) == []
    assert silence.silent({"a": 1}, 65.0) == []
    assert silence.silent({"a": 1}, 130.0) == []


def test_a_newcomer_is_not_judged_by_the_age_of_what_it_reads() -> None:
    silence: Silence[str] = Silence(5.0, 15.0)
    assert silence.silent({"a": "long ago"}, 1000.0) == []
