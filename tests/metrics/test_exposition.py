"""The declared metrics have the names that Prometheus expects, and their values are shown as Prometheus counts."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family

from averaging.metrics import PEER_METRICS, Distribution, Metric, MetricKind, Samples
from averaging.metrics.listener import BUCKETS, families
from tests.metrics.scraping import parsed
from tools.reference import METRICS

ALL = [metric for metrics in METRICS.values() for metric in metrics]


def shown(metrics: tuple[Metric, ...], samples: Samples) -> dict[str, dict[tuple[str, ...], float]]:
    class Collector:
        def collect(self) -> Iterator[Family]:
            return families(metrics, samples)

    registry = CollectorRegistry()
    registry.register(Collector())
    return parsed(generate_latest(registry).decode())


def test_names_are_unique_and_follow_the_conventions_of_prometheus() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert re.fullmatch(r"averaging_[a-z_]+[a-z]", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|mib)(_|$)", metric.name)
        assert metric.help.endswith("."), metric
        assert not {"peer", "endpoint", "member", "host", "address"} & set(metric.labels), metric
        assert all(len(values) == len(metric.labels) for values in metric.known), metric


def test_what_has_not_happened_yet_is_zero_and_what_is_unknown_is_missing() -> None:
    page = shown(PEER_METRICS, {"averaging_rounds_total": {("averaged",): 2}})
    assert page["averaging_rounds_total"] == {
        ("averaged",): 2.0,
        ("no_group",): 0.0,
        ("failed",): 0.0,
        ("cancelled",): 0.0,
    }
    assert page["averaging_dropped_members_total"][("silent",)] == 0.0
    assert "averaging_global_step" not in page


@given(st.lists(st.floats(0, 1e4), max_size=20))
def test_a_histogram_counts_up_to_each_bound(seconds: list[float]) -> None:
    durations = Distribution()
    for value in seconds:
        durations = durations.plus(value)
    page = shown(PEER_METRICS, {"averaging_round_duration_seconds": {("looking",): durations}})
    buckets = page["averaging_round_duration_seconds_bucket"]
    for bound in BUCKETS:
        assert buckets[(str(bound), "looking")] == sum(value <= bound for value in seconds)
    assert buckets[("+Inf", "looking")] == page["averaging_round_duration_seconds_count"][("looking",)] == len(seconds)
    assert page["averaging_round_duration_seconds_sum"][("looking",)] == pytest.approx(sum(seconds))
