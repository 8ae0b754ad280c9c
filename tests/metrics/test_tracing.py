"""A round is a span with its phases as children, and the spans of all members of a group are one trace."""

from __future__ import annotations

import asyncio
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from averaging.errors import ConfigError
from averaging.metrics import RoundTracer
from averaging.metrics.tracing import phases_of
from averaging.receipts import Outcome, Receipt
from tests.support.peers import average, enter, swarm
from tests.support.receipts import SILENT, receipt


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of a process that has set a tracer provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def ones() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(1000)}


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


@pytest.mark.asyncio
async def test_the_spans_of_all_members_are_one_trace(spans: InMemorySpanExporter) -> None:
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, [ones(), ones(), ones()], traces=True)
        receipts = await average(*peers)
        first = {trace_of(span) for span in spans.get_finished_spans()}
        await average(*peers)
    assert first == {int.from_bytes(receipts[0].group_id[:16])}
    assert len({trace_of(span) for span in spans.get_finished_spans()}) == 2
    rounds = [each for each in spans.get_finished_spans() if each.name == "averaging.round" and trace_of(each) in first]
    endpoints = {dict(span.attributes or {})["averaging.endpoint"] for span in rounds}
    assert endpoints == {kept.endpoint for kept in receipts}
    for span, kept in ((each, kept) for each in rounds for kept in receipts):
        attributes = dict(span.attributes or {})
        if attributes["averaging.endpoint"] == kept.endpoint:
            assert attributes["averaging.outcome"] == "averaged"
            assert attributes["averaging.bytes_sent"] == kept.bytes_sent
            children = [child for child in spans.get_finished_spans() if child.parent == span.context]
            assert [child.name for child in children] == [f"averaging.{phase}" for phase in kept.phases]
            assert all((span.start_time or 0) <= (child.start_time or 0) <= (child.end_time or 0) for child in children)
            assert max(child.end_time or 0 for child in children) <= (span.end_time or 0) + 1_000_000


@pytest.mark.asyncio
async def test_a_round_without_a_group_is_a_trace_of_its_own_and_an_error(spans: InMemorySpanExporter) -> None:
    async with AsyncExitStack() as stack:
        peer = await enter(stack, ones(), traces=True, round_timeout=0.1, group_wait=0.1)
        kept = await peer.average()
    assert kept.outcome is Outcome.NO_GROUP
    [span] = [span for span in spans.get_finished_spans() if span.name == "averaging.round"]
    assert span.parent is None
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description is not None
    assert "no other peer" in span.status.description


def test_a_dropped_member_is_an_event(spans: InMemorySpanExporter) -> None:
    RoundTracer().note(receipt(dropped=(SILENT,)))
    [span] = [span for span in spans.get_finished_spans() if span.name == "averaging.round"]
    [event] = span.events
    assert dict(event.attributes or {})["code"] == "silent"
    assert dict(event.attributes or {})["endpoint"] == SILENT.endpoint


def test_phases_follow_each_other() -> None:
    phases = list(phases_of(Receipt(1, Outcome.AVERAGED, phases={"looking": 1.0, "allreduce": 2.0}), 5))
    assert phases == [("looking", 5, 1_000_000_005), ("allreduce", 1_000_000_005, 3_000_000_005)]


def test_an_exporter_that_fails_harms_no_round(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = RoundTracer()
    monkeypatch.setattr(tracer, "_tracer", None)
    tracer.note(receipt())
    tracer.note(receipt())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


class Receiver:
    """A collector that takes traces over OTLP."""

    def __init__(self) -> None:
        received: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.put(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.received, self._server = received, HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.mark.asyncio
async def test_without_a_provider_the_spans_go_to_the_collector_that_the_variables_name(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, [ones(), ones()], traces=True)
        receipts = await average(*peers)
    traces = set()
    for _ in peers:
        request = await asyncio.to_thread(receiver.received.get, timeout=30)
        for resource in request.resource_spans:
            assert any(each.value.string_value == "averaging" for each in resource.resource.attributes)
            traces |= {span.trace_id for scope in resource.scope_spans for span in scope.spans}
    assert traces == {receipts[0].group_id[:16]}


@pytest.mark.asyncio
async def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"pip install 'averaging\[otel\]'"):
            await enter(stack, ones(), traces=True)


def test_nothing_is_imported_unless_it_is_switched_on() -> None:
    code = """
import sys, torch
from averaging import BlockingPeer
with BlockingPeer([torch.ones(1)], run_id="demo"):
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "prometheus_client")]
    sys.exit(bool(loaded))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
