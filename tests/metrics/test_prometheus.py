"""The configuration, rules and dashboard of deploy/ with the real Prometheus: `make test-prometheus`.

Four peers train and one of them is killed. The rules are those of deploy/, except that they wait for less time.
"""

import json
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.metrics.scraping import http_get
from tests.support.certificates import write
from tests.support.ports import free_address
from tests.support.processes import JsonProcess, averaging_process

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(900)]

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG, RULES = DEPLOY / "prometheus" / "prometheus.yml", DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "averaging.json").read_text())

VARIABLES = {"$job": "averaging", "$instance": ".*", "$__rate_interval": "30s"}
"""What Grafana would put into the queries."""

QUERIES = [
    (f"{panel['title']} {target['refId']}", target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]

PATIENCE = 200.0
"""Seconds after which a test that waits for Prometheus fails."""


def promtool(*arguments: str | Path) -> str:
    tool = shutil.which("promtool")
    assert tool is not None, "apt-get install prometheus"
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_configuration_and_the_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", CONFIG)
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    """`promtool test rules` computes the alerts of the real file from made-up series."""
    expressions = re.sub(r"^ {8}annotations:\n(?: {10}.*\n)+", "", RULES.read_text(), flags=re.MULTILINE)
    (tmp_path / "rules.yml").write_text(expressions)
    tests = tmp_path / "tests.yml"
    tests.write_text(json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": ALERT_TESTS}))
    promtool("test", "rules", tests)
    tested = {each["alertname"] for test in ALERT_TESTS for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert tested == set(re.findall(r"alert: (\w+)", RULES.read_text()))


def fires(alert: str, series: dict[str, str], at: str, not_at: str, *labels: str) -> dict[str, Any]:
    """A test of promtool: the alert fires at one time, with these labels, and does not at another."""
    severity = re.search(rf"alert: {alert}\n.*?severity: (\w+)", RULES.read_text(), re.DOTALL)
    assert severity is not None
    expected = {"severity": severity[1], "job": "averaging"} | dict.fromkeys(labels, "a:1")
    return {
        "interval": "1m",
        "input_series": [
            {"series": name.replace("{", '{job="averaging",'), "values": values} for name, values in series.items()
        ],
        "alert_rule_test": [
            {"alertname": alert, "eval_time": at, "exp_alerts": [{"exp_labels": expected}]},
            {"alertname": alert, "eval_time": not_at, "exp_alerts": []},
        ],
    }


A, B = 'instance="a:1"', 'instance="b:1"'
ROUNDS = 'averaging_rounds_total{outcome="averaged",'

STALLS = {
    f"averaging_interpreter_stall_seconds_total{{{A}}}": "0x30 60x30",
    f"averaging_loop_stall_seconds_total{{{A}}}": "0x60",
}

ALERT_TESTS = [
    # Both peers average until minute 30.
    fires("AveragingNoRounds", {f"{ROUNDS}{A}}}": "0+6x30 180x60", f"{ROUNDS}{B}}}": "0+6x30 180x60"}, "45m", "38m"),
    # One of them averages on.
    fires(
        "AveragingPeerWithoutRounds",
        {f"{ROUNDS}{A}}}": "0+6x30 180x60", f"{ROUNDS}{B}}}": "0+6x90"},
        *("45m", "38m", "instance"),
    ),
    fires("AveragingPeerDown", {f"up{{{A}}}": "1x30 0x10", f"up{{{B}}}": "1x40"}, "34m", "30m", "instance"),
    fires(
        "AveragingDropsRising", {f'averaging_dropped_members_total{{code="silent",{A}}}': "0x70 1+1x20"}, "80m", "65m"
    ),
    # A fifth of the time for an hour, then two fifths.
    fires(
        "AveragingWaiting", {f"averaging_waiting_seconds_total{{{A}}}": "0+12x60 744+24x60"}, "90m", "50m", "instance"
    ),
    fires(
        "AveragingFollowerStale",
        {f"averaging_follower_staleness_seconds{{{A}}}": "0x10 60+60x30"},
        *("25m", "15m", "instance"),
    ),
    fires(
        "AveragingCertificateExpires",
        {f"averaging_certificate_expiry_timestamp_seconds{{{A}}}": f"{14 * 86400 + 1800}x60"},
        *("40m", "20m", "instance"),
    ),
    fires("AveragingStandsStill", STALLS, "34m", "25m", "instance"),
    fires("AveragingClockWrong", {f"averaging_clock_offset_seconds{{{A}}}": "0x30 -3x30"}, "40m", "30m", "instance"),
    fires("AveragingNotReady", {f"averaging_ready{{{A}}}": "1x30 0x30"}, "50m", "40m", "instance"),
]


class Prometheus:
    """A Prometheus that scrapes these targets every second."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        self.address = free_address()
        config, rules = CONFIG.read_text(), RULES.read_text()
        listed = re.search(r"(          - peer-\d:9464\n)+", config)
        assert listed is not None
        config = config.replace(listed[0], "".join(f"          - {target}\n" for target in targets.values()))
        (folder / "prometheus.yml").write_text(config.replace("interval: 15s", "interval: 1s"))
        (folder / "rules.yml").write_text(re.sub(r"\bfor: \w+", "for: 2s", rules))
        self._process = subprocess.Popen(
            [
                shutil.which("prometheus") or "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def get(self, path: str, **query: str) -> Any:
        status, body = http_get(self.address, f"/api/v1/{path}?{urlencode(query)}")
        if status == 503:
            raise ConnectionError("Prometheus is starting")
        assert status == 200, body
        return json.loads(body)["data"]

    def values(self, query: str) -> list[float]:
        """The values of an instant query, without those that are not a number."""
        result = [float(each["value"][1]) for each in self.get("query", query=query)["result"]]
        return [value for value in result if not math.isnan(value)]

    def firing(self) -> set[tuple[str, str]]:
        """Firing alerts: names and instances."""
        alerts = self.get("alerts")["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"].get("instance", ""))
            for each in alerts
            if each["state"] == "firing"
        }


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except OSError:  # Prometheus is starting
            pass
        assert time.monotonic() < end, what
        time.sleep(0.2)


class ScrapedRun:
    """Four peers with certificates, a follower, and Prometheus."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        files = {name: str(path) for name, path in write(folder, "127.0.0.1").items()}
        options: dict[str, Any] = {"run_id": "run", "metrics_listen": "127.0.0.1:0", "join_timeout": 60.0, **files}

        def start(**more: Any) -> JsonProcess:
            trains = {"strategy": "diloco", "way": "until ended", "every": 20, "peers": 1, "seconds": 0.05}
            told = {**trains, "publishes": True, "options": options, **more}
            worker = ("python", "-m", "tests.support.trainer", json.dumps(told))
            return stack.enter_context(JsonProcess(*worker))

        founder = start()
        ready = founder.expect("ready", PATIENCE)
        join = [ready["endpoint"]]
        self.peers = [founder, *(start(join=join) for _ in range(3))]
        others = [peer.expect("ready", PATIENCE) for peer in self.peers[1:]]
        targets = {f"peer {number}": each["metrics"] for number, each in enumerate([ready, *others])}
        flags = [text for name, path in files.items() for text in (f"--{name.replace('_', '-')}", path)]
        output = str(folder / "now.safetensors")
        follow = averaging_process(
            "follow", join[0], "--output", output, "--timeout", "60", "--metrics-listen", "127.0.0.1:0", *flags
        )
        self.follower = stack.enter_context(follow)
        targets["follower"] = self.follower.expect("ready", PATIENCE)["metrics"]
        self.targets = targets
        self.prometheus = Prometheus(folder, targets)
        stack.callback(self.prometheus.close)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedRun]:
    """A run in which all train; the last test kills one peer."""
    with ExitStack() as stack:
        run = ScrapedRun(stack, tmp_path_factory.mktemp("prometheus"))
        averaged = 'min(increase(averaging_rounds_total{outcome="averaged"}[30s]))'
        until(lambda: bool(run.prometheus.values(f"{averaged} > 2")), "all four peers average")
        until(lambda: bool(run.prometheus.values("averaging_follower_version > 0")), "the follower has a version")
        yield run


def test_all_peers_and_the_follower_are_scraped(run: ScrapedRun) -> None:
    targets = run.prometheus.get("targets")["activeTargets"]
    assert {target["labels"]["instance"] for target in targets} == set(run.targets.values())
    until(lambda: run.prometheus.values('sum(up{job="averaging"})') == [5.0], "all answer")
    assert run.prometheus.values("min(averaging_peers)") == [4.0]


@pytest.mark.parametrize(("panel", "query"), QUERIES, ids=[name for name, _ in QUERIES])
def test_each_query_of_the_dashboard_returns_data(panel: str, query: str, run: ScrapedRun) -> None:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    until(lambda: bool(run.prometheus.values(query)), f"{panel}: {query} returns data")


def test_every_metric_of_the_dashboard_and_of_the_rules_is_declared() -> None:
    from tools.reference import METRICS

    declared = {metric.name for metrics in METRICS.values() for metric in metrics}
    text = RULES.read_text() + json.dumps(DASHBOARD["panels"])
    used = set(re.findall(r"\baveraging_\w+", text))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= declared


def test_z_a_peer_that_is_killed_raises_the_alert_and_the_others_go_on(run: ScrapedRun) -> None:
    prometheus, killed = run.prometheus, run.targets["peer 3"]
    assert ("AveragingPeerDown", killed) not in prometheus.firing()
    run.peers[3].signal(signal.SIGKILL)
    until(lambda: ("AveragingPeerDown", killed) in prometheus.firing(), "the alert fires")
    others = f'averaging_rounds_total{{outcome="averaged",instance!="{killed}"}}'
    [before] = prometheus.values(f"min({others})")
    until(lambda: prometheus.values(f"min({others})")[0] > before + 2, "the others average without it")
    assert not {name for name, instance in prometheus.firing() if instance in list(run.targets.values())[:3]} & {
        *("AveragingPeerDown", "AveragingPeerWithoutRounds", "AveragingNotReady")
    }
