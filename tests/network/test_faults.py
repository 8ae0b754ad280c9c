"""The faults of `TwoSites` are what they are called: plain TCP meets them as between real machines."""

from __future__ import annotations

import json

import pytest

from tests.network.namespaces import TwoSites

pytestmark = pytest.mark.network

PORT = 4222

SINK = """
import json, socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print(json.dumps({"event": "up"}), flush=True)
    while True:
        connection, (host, *_) = server.accept()
        print(json.dumps({"event": "connection", "host": host}), flush=True)
        while received := connection.recv(1 << 16):
            print(json.dumps({"event": "received", "bytes": len(received)}), flush=True)
"""

SEND = """
import fcntl, json, socket, struct, sys, termios, time
host, port, limit, *steps = sys.argv[1:]
with socket.socket() as connection:
    connection.settimeout(1.0)
    if int(limit):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, int(limit))
    connection.connect((host, int(port)))
    for step in steps:
        pause, count = map(int, step.split(":"))
        time.sleep(pause)
        connection.sendall(bytes(count))
    end = time.monotonic() + 2.0
    unsent = 1
    while unsent and time.monotonic() < end:
        unsent = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
        time.sleep(0.01)
    print(json.dumps({"unsent": unsent}))
"""


def unsent(sites: TwoSites, *steps: str, limit: int = 0) -> int:
    """Bytes that a connection from a to b did not get through.

    Args:
        steps: `SECONDS:BYTES` to wait and then to send.
        limit: Largest segment, if it is limited.
    """
    done = sites.run("a", "python", "-c", SEND, sites.addresses("b")[0], str(PORT), str(limit), *steps)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["unsent"])


@pytest.fixture
def sink(sites: TwoSites) -> None:
    """A server at b that takes everything."""
    sites.start("b", "python", "-c", SINK, str(PORT)).expect("up")


@pytest.mark.usefixtures("sink")
def test_a_large_payload_hangs_where_packets_vanish_silently(sites: TwoSites) -> None:
    assert unsent(sites, "0:65536") == 0
    sites.narrow(1280)
    assert unsent(sites, "0:100") == 0
    assert unsent(sites, "0:65536") == 65536
    assert unsent(sites, "0:65536", limit=1240) == 0
    assert unsent(sites, "0:65536", limit=1241) == 65536


@pytest.mark.usefixtures("sink")
def test_it_passes_where_the_gateways_say_how_large_packets_may_be(sites: TwoSites) -> None:
    sites.narrow(1280, icmp=True)
    assert unsent(sites, "0:65536") == 0


@pytest.mark.usefixtures("sink")
def test_a_gateway_forgets_idle_connections(sites: TwoSites) -> None:
    sites.forget_after(2)
    assert unsent(sites, "0:100", "1:100") == 0
    assert unsent(sites, "0:100", "4:100") == 100


def test_nobody_calls_back_through_nat(sites: TwoSites) -> None:
    sites.masquerade()
    for host in ("a", "b"):
        sites.start(host, "python", "-c", SINK, str(PORT)).expect("up")
    connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)"
    outward = sites.run("a", "python", "-c", connect, sites.addresses("b")[0], str(PORT))
    inward = sites.run("b", "python", "-c", connect, sites.addresses("a")[0], str(PORT))
    assert outward.returncode == 0, outward.stderr
    assert "timed out" in inward.stderr
