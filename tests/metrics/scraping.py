"""Reads what a peer answers over HTTP to Prometheus and probes."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy this machine has


def http_get(endpoint: str, path: str, timeout: float = 30.0) -> tuple[int, str]:
    """Status and body of a GET."""
    try:
        with OPENER.open(f"http://{endpoint}{path}", timeout=timeout) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def parsed(page: str) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of a page of metrics by name, and by the values of their labels in the order of the labels' names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def scrape(endpoint: str) -> dict[str, dict[tuple[str, ...], float]]:
    """The metrics of a peer, see `parsed`."""
    status, page = http_get(endpoint, "/metrics")
    assert status == 200, page
    return parsed(page)
