"""Spans and histograms, recorded with OpenTelemetry's SDK."""

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import outbox as package
from outbox import consumer
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _cart(no_consumers):
    consumer(Placed, group="cart")(lambda message, context: None)


@pytest.fixture
def spans(monkeypatch):
    """Set up OpenTelemetry for the test; return the exporter."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


@pytest.fixture
def seconds(monkeypatch):
    """Set up meters for the test; return the histograms: name -> attributes, count and sum of what was recorded."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)

    def seconds():
        found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        points = {metric.name: metric.data.data_points[0] for metric in found}
        return {name: (dict(point.attributes), point.count, point.sum) for name, point in points.items()}

    return seconds


def publish(**options):
    with package.atomic():
        return package.publish(Placed("A1"), **options)


def test_one_message_has_three_spans_which_its_traceparent_links(spans, outbox):
    sent = publish()
    outbox.run_until_idle()

    create, send, process = (spans()[f"{what} orders"] for what in ("create", "send", "process"))
    assert create.kind is trace.SpanKind.PRODUCER
    linked = [[link.context.span_id for link in span.links] for span in (send, process)]
    assert linked == [[create.context.span_id], [create.context.span_id]]
    assert dict(process.attributes) == {
        "messaging.system": "outbox",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "cart",
        "messaging.message.id": str(sent.message_id),
        "messaging.message.body.size": process.attributes["messaging.message.body.size"],
    }
    assert send.attributes["messaging.batch.message_count"] == 1


def test_the_span_of_the_view_is_the_parent(spans, outbox):
    with trace.get_tracer_provider().get_tracer("shop").start_as_current_span("POST /orders/") as view:
        publish()

    assert spans()["create orders"].parent == view.get_span_context()


def test_what_a_handler_publishes_belongs_to_its_span(spans, outbox):
    consumer(Placed, group="letters")(lambda message, context: message.items == 1 and package.publish(Placed("A2", items=0)))
    publish()

    outbox.run_until_idle()

    assert spans()["create orders"].parent is not None  # the last one


def test_a_traceparent_of_the_callers_own_is_kept(spans, outbox):
    publish(headers={"traceparent": GIVEN})

    [found] = outbox.published(Placed)
    assert found.headers["traceparent"] == GIVEN
    assert spans() == {}


def test_an_error_of_the_handler_is_on_its_span(spans, outbox):
    consumer(Placed, group="points")(lambda message, context: 1 / 0)
    publish()

    with pytest.raises(Exception, match="division by zero"):
        outbox.run_until_idle()

    failed = [span for span in spans().values() if not span.status.is_ok]
    assert [event.name for span in failed for event in span.events] == ["exception"]


def test_histograms_tell_how_long_a_message_took(seconds, outbox):
    publish()
    outbox.run_until_idle()

    found = seconds()
    assert found["outbox.publish_to_sent"][:2] == ({"topic": "orders", "broker": "default"}, 1)
    assert found["outbox.publish_to_handled"][:2] == ({"topic": "orders", "group": "cart"}, 1)
    assert 0 <= found["outbox.publish_to_sent"][2] <= found["outbox.publish_to_handled"][2] < 60


class Broken(SimpleSpanProcessor):
    def on_start(self, span, parent_context=None):
        raise RuntimeError("no more memory")

    def on_end(self, span):
        raise RuntimeError("no more memory")


def test_a_processor_that_raises_fails_no_publish_no_send_and_no_handler(monkeypatch, outbox, caplog):
    provider = TracerProvider()
    provider.add_span_processor(Broken(InMemorySpanExporter()))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    handled = []
    consumer(Placed, group="points")(lambda message, context: handled.append(message.invoice))

    publish()
    outbox.run_until_idle()

    assert handled == ["A1"]
    assert "OpenTelemetry failed" in caplog.text


def test_providers_that_cannot_be_loaded_fail_no_publish_no_send_and_no_handler(monkeypatch, outbox):
    def fail():
        raise RuntimeError("no such entry point")

    monkeypatch.setattr(trace, "get_tracer_provider", fail)
    monkeypatch.setattr(metrics, "get_meter_provider", fail)
    handled = []
    consumer(Placed, group="points")(lambda message, context: handled.append(message.invoice))

    publish()
    outbox.run_until_idle()

    assert handled == ["A1"]


def test_nothing_is_added_where_opentelemetry_is_not_set_up(outbox):
    publish()

    [found] = outbox.published(Placed)
    assert "traceparent" not in found.headers
