"""
Spans and histograms for OpenTelemetry. Without the extra `opentelemetry`, or without a provider, nothing is recorded.

Spans follow the semantic conventions for messaging: `create` when a message is published, `send` for each call of the relay to
the broker, `process` around the handler. A message has the `traceparent` of its `create` span, and the other two spans link to
it. Histograms measure the time from publishing a message until it was sent, and until it was handled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox import conf
from outbox.logs import error_text, get_logger
from outbox.message import Header

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    trace = metrics = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from outbox.brokers.base import Delivery, Outgoing

logger = get_logger(__name__)

NAME = "outbox"
MAX_LINKS = 128  # of one span; most collectors keep no more
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
API_ONLY = ("opentelemetry.trace", "opentelemetry.metrics")  # the modules of the no-op providers


def create(topic: str, message_id: object, size: int) -> str:
    """Record a `create` span for a published message; return its `traceparent`, or "" without tracing."""
    if not _is_traced():
        return ""
    carrier: dict[str, str] = {}
    with _guard():
        attributes = _attributes("create", topic)
        attributes |= {"messaging.message.id": str(message_id), "messaging.message.body.size": size}
        span = _tracer().start_span(f"create {topic}", kind=trace.SpanKind.PRODUCER, attributes=attributes)
        span.end()
        TraceContextTextMapPropagator().inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get(Header.TRACEPARENT, "")


@contextmanager
def send(messages: Sequence[Outgoing]) -> Iterator[None]:
    """Record a `send` span for a call to the broker."""
    span: Any = nullcontext()
    with _guard():
        if _is_set_up(trace and trace.get_tracer_provider()):
            topics = sorted({message.topic for message in messages})
            attributes = _attributes("send", *topics)
            attributes["messaging.batch.message_count"] = len(messages)
            links = _links(message.headers.get(Header.TRACEPARENT, "") for message in messages)
            name = f"send {', '.join(topics)}"
            span = _tracer().start_as_current_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes, links=links)
    with _harmless(span):
        yield


def process(group: str, deliveries: Sequence[Delivery]) -> AbstractContextManager[None]:
    """Return a context manager that records a `process` span for a handler, with its exception."""
    if not _is_traced():
        return nullcontext()
    span: Any = nullcontext()
    with _guard():
        first = deliveries[0]
        attributes = _attributes("process", first.topic)
        attributes["messaging.consumer.group.name"] = group
        if len(deliveries) > 1:
            attributes["messaging.batch.message_count"] = len(deliveries)
        else:
            attributes |= {"messaging.message.id": first.message_id, "messaging.message.body.size": len(first.body)}
        links = _links(delivery.headers.get(Header.TRACEPARENT, "") for delivery in deliveries)
        name = f"process {first.topic}"
        span = _tracer().start_as_current_span(name, kind=trace.SpanKind.CONSUMER, attributes=attributes, links=links)
    return _harmless(span)


def record_sent(broker: str, topic: str, message_ids: Iterable[str]) -> None:
    """Record the time from publishing messages until the broker confirmed them."""
    with _guard():
        provider = metrics and metrics.get_meter_provider()
        if _is_set_up(provider):
            histogram = _histogram(provider, "outbox.publish_to_sent", "Time from publish until the broker has the message.")
            _record(histogram, message_ids, {"topic": topic, "broker": broker})


def record_handled(group: str, deliveries: Sequence[Delivery]) -> None:
    """Record the time from publishing messages until a group handled them, including retries."""
    if not _is_measured():
        return
    with _guard():
        provider = metrics.get_meter_provider()
        histogram = _histogram(provider, "outbox.publish_to_handled", "Time from publish until a group has handled the message.")
        for delivery in deliveries:
            _record(histogram, [delivery.message_id], {"topic": delivery.topic, "group": group})


@contextmanager
def _guard() -> Iterator[None]:
    """Log errors in the block instead of raising them, so that an error in a span processor fails no publish and no handler."""
    try:
        yield
    except Exception as error:
        _log(error)


def _log(error: Exception) -> None:
    logger.error("OpenTelemetry failed, and nothing was recorded: %s", error_text(error), exc_info=error)


@contextmanager
def _harmless(span: Any) -> Iterator[None]:
    """Enter a span during the block. Exceptions of the block are raised; exceptions of the span are logged."""
    raised: BaseException | None = None
    entered = ExitStack()
    with _guard():
        entered.enter_context(span)
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        with _guard():
            entered.__exit__(type(raised) if raised else None, raised, raised.__traceback__ if raised else None)


def _is_traced() -> bool:
    """Return whether there is a tracer provider. This is called for each message, so it is fast without a provider."""
    try:
        return _is_set_up(trace and trace.get_tracer_provider())
    except Exception as error:
        _log(error)
        return False


def _is_measured() -> bool:
    """Return whether there is a meter provider."""
    try:
        return _is_set_up(metrics and metrics.get_meter_provider())
    except Exception as error:
        _log(error)
        return False


def _is_set_up(provider: object) -> bool:
    return provider is not None and not type(provider).__module__.startswith(API_ONLY)


def _tracer() -> trace.Tracer:
    return trace.get_tracer_provider().get_tracer(NAME)


@lru_cache(maxsize=8)
def _histogram(provider: metrics.MeterProvider, name: str, description: str) -> metrics.Histogram:
    meter = provider.get_meter(NAME)
    return meter.create_histogram(name, unit="s", description=description, explicit_bucket_boundaries_advisory=SECONDS)


def _record(histogram: metrics.Histogram, message_ids: Iterable[str], attributes: dict[str, str]) -> None:
    now = time.time()
    for message_id in message_ids:
        with suppress(ValueError):  # the id of another producer's message may be any text
            if (uuid := UUID(message_id)).version == 7:
                histogram.record(max(0.0, now - (uuid.int >> 80) / 1000), attributes)


def _attributes(operation: str, *topics: str) -> dict[str, Any]:
    return {
        "messaging.system": conf.broker_class(conf.topic_settings(topics[0]).broker).system,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": ", ".join(topics),
    }


def _links(traceparents: Iterator[str]) -> list[trace.Link]:
    links: list[trace.Link] = []
    for traceparent in traceparents:
        context = trace.get_current_span(TraceContextTextMapPropagator().extract({Header.TRACEPARENT: traceparent}))
        if traceparent and context.get_span_context().is_valid and len(links) < MAX_LINKS:
            links.append(trace.Link(context.get_span_context()))
    return links
