"""Each round as a span of OpenTelemetry with its phases as children, joined over the peers of a group.

The spans are made from the receipt once the round is over. The trace id follows from the id of the group, so the spans
of all members are one trace, although the members send no context to each other. OpenTelemetry is imported only here,
and only if it is switched on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from averaging.common import spelled
from averaging.errors import ConfigError, printable
from averaging.receipts import Receipt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger("averaging.metrics")

CLOSE_SECONDS = 5.0
"""Seconds for which the last spans may be on their way when a peer ends."""

MAX_REASON = 500
"""Characters of a reason in a span."""

NANOSECONDS = 1_000_000_000


class RoundTracer:
    """Makes the spans of a peer's rounds.

    They go to the tracer provider of the process. If the process has set none, they go over OTLP to the collector that
    the variables of OpenTelemetry name, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self) -> None:
        self._failed = False
        try:
            from opentelemetry import trace

            self._own = _own_provider() if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider) else None
        except ImportError as error:
            raise ConfigError(
                f"{spelled('traces', True)} needs OpenTelemetry ({error}); install it: python -m pip install "
                "'averaging[otel]'",
                "traces",
            ) from None
        provider = self._own or trace.get_tracer_provider()
        self._tracer = provider.get_tracer("averaging", metadata.version("averaging"))

    def note(self, receipt: Receipt) -> None:
        """Makes the spans of a round that has ended. A failure is logged once, and does not harm the round."""
        try:
            self._note(receipt)
        except Exception:  # of any exporter
            if not self._failed:
                self._failed = True
                logger.exception("the spans of round %d cannot be made; further failures are not logged", receipt.round)

    def _note(self, receipt: Receipt) -> None:
        from opentelemetry import trace

        began = int(receipt.started * NANOSECONDS)
        end = began + int(receipt.seconds * NANOSECONDS)
        span = self._tracer.start_span("averaging.round", group_context(receipt), start_time=began)
        span.set_attributes(_attributes(receipt))
        for dropped in receipt.dropped:
            fields = {"endpoint": printable(dropped.endpoint), "reason": printable(dropped.reason)[:MAX_REASON]}
            span.add_event("averaging.dropped", {"code": dropped.code.value, **fields}, end)
        if not receipt.averaged:
            span.set_status(trace.Status(trace.StatusCode.ERROR, printable(receipt.reason)[:MAX_REASON]))
        for phase, first, last in phases_of(receipt, began):
            self._child(span, f"averaging.{phase}", first, last)
        span.end(end)

    def _child(self, span: Span, name: str, began: int, end: int) -> None:
        from opentelemetry import trace

        self._tracer.start_span(name, trace.set_span_in_context(span), start_time=began).end(end)

    async def close(self) -> None:
        """Sends the last spans, if the provider is this object's own; a collector that is gone delays it for 5 s."""
        if self._own is not None:
            thread = threading.Thread(target=self._own.shutdown, name="last spans", daemon=True)
            thread.start()
            await asyncio.to_thread(thread.join, CLOSE_SECONDS)


def _own_provider() -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # from variables such as OTEL_SERVICE_NAME
    if str(resource.attributes.get("service.name")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "averaging"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def group_context(receipt: Receipt) -> Context | None:
    """The context that all members of a group have in common; None without a group.

    Its span id follows from the group's id as well. Nobody makes that span; it only joins those of the members.
    """
    from opentelemetry import trace

    trace_id, span_id = receipt.group_id[:16], receipt.group_id[-8:]
    if len(receipt.group_id) < 16 or not any(trace_id) or not any(span_id):
        return None
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    group = trace.SpanContext(int.from_bytes(trace_id), int.from_bytes(span_id), is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(group))


def phases_of(receipt: Receipt, began: int) -> Iterator[tuple[str, int, int]]:
    """The phases of a round with start and end, in nanoseconds since the epoch."""
    for phase, seconds in receipt.phases.items():
        end = began + int(seconds * NANOSECONDS)
        yield phase, began, end
        began = end


def _attributes(receipt: Receipt) -> dict[str, Any]:
    return {
        "averaging.run_id": receipt.run_id,
        "averaging.endpoint": receipt.endpoint,
        "averaging.round": receipt.round,
        "averaging.outcome": receipt.outcome.value,
        "averaging.topic": receipt.topic,
        "averaging.role": "" if receipt.role is None else receipt.role.value,
        "averaging.group_id": receipt.group_id.hex(),
        "averaging.members": len(receipt.members),
        "averaging.dropped_members": len(receipt.dropped),
        "averaging.bytes_sent": receipt.bytes_sent,
        "averaging.bytes_received": receipt.bytes_received,
        "averaging.state_version": receipt.state_version,
    }
