"""Quotas per host, compared with sums over all that was taken."""

import math
import random

import pytest

from averaging.common import HostQuota


@pytest.mark.parametrize(("in_all", "per_host"), [(20, 8), (5, 8), (math.inf, 8)])
def test_a_quota_is_the_sum_of_what_was_taken(in_all: float, per_host: float) -> None:
    rng, quota, taken = random.Random(1), HostQuota(in_all, per_host), list[tuple[str, int]]()
    refused = 0
    for _ in range(2000):
        if taken and rng.random() < 0.45:
            quota.leave(*taken.pop(rng.randrange(len(taken))))
            continue
        host, amount = rng.choice("abcd"), rng.randint(1, 3)
        of_host = sum(each for name, each in taken if name == host)
        room = of_host + amount <= per_host and sum(each for _, each in taken) + amount <= in_all
        assert quota.taken_by(host) == of_host
        assert quota.take(host, amount) == room
        refused += not room
        if room:
            taken.append((host, amount))
    assert refused
    for host, amount in taken:
        quota.leave(host, amount)
    assert not quota._taken, "hosts that have nothing are forgotten"
