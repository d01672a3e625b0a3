"""docs/reference/settings.md, from outbox/conf/sections.py, outbox/pipeline/conf.py and the options of the brokers."""

from __future__ import annotations

import re

from docs.blocks import reasons
from docs.blocks.markdown import code, definitions, flat, of_app
from docs.blocks.source import Attribute, attributes, docstring

CONF = "outbox/conf/sections.py"
PIPELINE_CONF = "outbox/pipeline/conf.py"

SECTIONS = [
    ("OUTBOX", CONF, "Settings"),
    ('OUTBOX["BROKERS"][alias]', CONF, "BrokerSettings"),
    ('OUTBOX["TOPICS"][name]', CONF, "TopicSettings"),
    ('OUTBOX["RELAY"]', CONF, "RelaySettings"),
    ('OUTBOX["CONSUMER"]', CONF, "ConsumerSettings"),
    ('OUTBOX["CHECK_BACK"]', CONF, "CheckBackSettings"),
]
PIPELINE = [
    ('OUTBOX["PIPELINE"]', PIPELINE_CONF, "PipelineSettings"),
    ('OUTBOX["PIPELINE"]["AUDIT"][name]', PIPELINE_CONF, "AuditSettings"),
    ('OUTBOX["PIPELINE"]["ARCHIVE"]', PIPELINE_CONF, "ArchiveSettings"),
]
OPTIONS = [
    ("outbox.embedded.EmbeddedBroker", "outbox/embedded/options.py", "EmbeddedOptions", "outbox.embedded"),
    ("outbox.brokers.rocketmq.RocketMQBroker", "outbox/brokers/rocketmq/options.py", "RocketMQOptions", ""),
    ("outbox.celery.CeleryBroker", "outbox/celery/options.py", "CeleryOptions", ""),
    ("outbox.brokers.kafka.KafkaBroker", "outbox/brokers/kafka/options.py", "KafkaOptions", ""),
    ("outbox.brokers.rabbitmq.RabbitMQBroker", "outbox/brokers/rabbitmq/options.py", "RabbitMQOptions", ""),
    ("outbox.brokers.memory.MemoryBroker", "outbox/brokers/memory/options.py", "MemoryOptions", ""),
]

TYPES = {
    "Callable[[], datetime]": "function",
    "SmallCount": "int, 1 to 32,767",
    "QueueName": "text, 1 to 255 characters",
    "EndSemantics": "idempotent or stateless",
    "Positive": "int, 1 or more",
    "TopicType": "normal, transaction, fifo or delay",
    "dict[str, Any]": "dict",
}
RANGE = re.compile(r"Annotated\[int, msgspec\.Meta\(ge=(\d+)(?:, le=(\d+))?\)\]")


def page() -> str:
    """Make the page."""
    parts = [_section(f"`{place}`", path, name) for place, path, name in SECTIONS]
    parts += [_section(f"`{place}`", path, name, app="outbox.pipeline") for place, path, name in PIPELINE]
    parts.append('## `OPTIONS` of the brokers\n\nIn `OUTBOX["BROKERS"][alias]["OPTIONS"]`, beside its `BACKEND`.')
    parts += [_section(f"`{backend}`", path, name, level=3, app=app) for backend, path, name, app in OPTIONS]
    return "\n\n".join(parts)


def _section(title: str, path: str, name: str, *, level: int = 2, app: str = "") -> str:
    why = reasons.SETTINGS[name]
    entries = [
        [f"{code(one.name.upper())}: {_type(one)}, {_default(one)}", one.comment, f"*Change it when:* {why[one.name]}"]
        for one in attributes(path, name)
    ]
    return "\n\n".join(
        [
            f"{'#' * level} {title}",
            f"{flat(docstring(path, name))} {of_app(app) if app else ''}".strip(),
            definitions(entries),
        ]
    )


def _type(one: Attribute) -> str:
    annotation = one.annotation.removesuffix(" | None")
    if match := RANGE.fullmatch(annotation):
        least, most = match.groups()
        return f"int, {least} to {int(most):,}" if most else f"int, {least} or more"
    if annotation.startswith("Literal["):
        return " or ".join(re.findall(r"'(\w+)'", annotation))
    if annotation.endswith("Settings"):
        return "dict"
    return "dict of dicts" if annotation.endswith("Settings]") else TYPES.get(annotation, annotation)


def _default(one: Attribute) -> str:
    """Return the default as one writes it; of a section, nothing: its own defaults stand in its table."""
    if not one.value:
        return "required"
    factory = re.fullmatch(r"msgspec\.field\(default_factory=lambda: (.+)\)", one.value)
    value = factory[1] if factory else one.value
    return "default " + code(re.sub(r"\w+Settings\(\)", "{}", value).replace("'", '"'))
