"""What is logged of callers that are refused."""

import logging

import pytest

from averaging.transport.grpc.authentication import MAX_HOSTS, PERIOD, Refusals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_host_is_named_once_a_minute_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for second in range(150):
        clock.now = float(second)
        refusals.note("ipv4:192.0.2.7", "it sent no token")
        refusals.note("ipv6:%5B2001:db8::7%5D", "it sent another\x1b[31m token")
    assert (
        caplog.messages
        == [
            "refused a call from 192.0.2.7: it sent no token",
            "refused a call from [2001:db8::7]: it sent another?[31m token",
        ]
        * 3
    )
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_many_hosts_fill_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for number in range(10_000):
        clock.now = number / 1000
        refusals.note(f"ipv4:10.0.{number // 256}.{number % 256}", "x" * 1000)
    assert len(caplog.messages) == len(refusals._logged) == MAX_HOSTS
    assert max(map(len, caplog.messages)) < 400
    clock.now = 2 * PERIOD
    refusals.note("ipv4:192.0.2.7", "it sent no token")
    assert caplog.messages[-1] == "refused a call from 192.0.2.7: it sent no token"
    assert len(refusals._logged) == 1
