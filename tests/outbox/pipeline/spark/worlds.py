"""A small history, right in every respect, to which a test does one thing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

from outbox.pipeline.spark.config import AuditedGroup, Business, PipelineConfig, Source
from tests.outbox.pipeline.spark.twins import OURS, alike, judged_by_sql

if TYPE_CHECKING:  # a world is made, and judged by SQL, where no Spark is
    from outbox.pipeline.spark.findings import Report
    from outbox.pipeline.spark.history import History, RecordedTimes

FRAMES = ("business", "messages", "places", "broker", "inbox", "failed_deliveries", "marks")
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOW = START + timedelta(hours=2)
SECOND = timedelta(seconds=1)

CONFIG = PipelineConfig(
    outbox=Source("nowhere"),
    business=[Business("orders", "orders", "shop.order", "OrderPlaced")],
    groups=[AuditedGroup("cart", ["orders"]), AuditedGroup("points", ["orders"])],
    seen_topics=["orders"],
    shuffle_partitions=2,
)


def message_id(topic: str, lane: int, number: int) -> str:
    """Return a uuid7 of 1 March 2026, 12:00 UTC and a few seconds, as the number says."""
    milliseconds = f"{1772366400000 + number * 10:012x}"
    rest = uuid5(NAMESPACE_OID, f"{topic} {lane} {number}").hex
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7{rest[:3]}-8{rest[3:6]}-{rest[6:18]}"


@dataclass
class World:
    """Rows of all frames, as dicts; `add` puts messages in, `drop` takes rows out."""

    frames: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in FRAMES})
    config: PipelineConfig = CONFIG
    as_of: datetime = NOW
    recorded: dict[str, RecordedTimes] = field(default_factory=dict)

    def add(self, count: int, *, topic: str = "orders", lane: int = 0, first: int = 1, key: str = "k") -> World:
        """Add messages that went all the way, numbered from `first`."""
        for number in range(first, first + count):
            at = START + number * SECOND / 100
            base = {"source": OURS, "topic": topic, "lane": lane, "number": number, "message_id": message_id(topic, lane, number)}
            about = f"shop.order:{topic}-{lane}-{number}"
            self.frames["business"].append({"subject": "orders", "about": about, "at": at})
            self.frames["messages"].append({**base, "key": key, "type": "OrderPlaced", "about": about, "at": at})
            self.frames["places"].append({**base, "state": "sent", "claimed_at": at, "at": at + SECOND / 100})
            stored = {**base, "key": key, "queue": 0, "pos": number}
            self.frames["broker"].append({**stored, "at": at + 2 * SECOND / 100})
            for group in self.config.groups:
                if topic in group.topics:
                    handled = {**base, "consumer_group": group.name, "delivery_count": 1}
                    self.frames["inbox"].append({**handled, "at": at + 3 * SECOND / 100})
        self.mark(first + count - 1, topic=topic, lane=lane)
        return self

    def mark(self, last: int, *, topic: str = "orders", lane: int = 0, first: int = 1) -> World:
        """Return what the lane has given out."""
        marks = self.frames["marks"]
        marks[:] = [mark for mark in marks if (mark["topic"], mark["lane"]) != (topic, lane)]
        marks.append({"source": OURS, "topic": topic, "lane": lane, "first": first, "last": last})
        return self

    def drop(self, *names: str, **values: Any) -> World:
        """Take rows out of frames: those that have these values; a list: one of them."""
        for name in names:
            self.frames[name] = [row for row in self.frames[name] if not _has(row, values)]
        return self

    def change(self, name: str, values: dict[str, Any], **which: Any) -> World:
        """Return rows of a frame other values."""
        self.frames[name] = [{**row, **values} if _has(row, which) else row for row in self.frames[name]]
        return self

    def set(self, **values: Any) -> World:
        """Configure it otherwise."""
        self.config = replace(self.config, **values)
        return self

    def history(self, spark: Any) -> History:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        from outbox.pipeline.spark.history import FRAMES as SCHEMAS
        from outbox.pipeline.spark.history import History

        frames = {}
        for name, schema in SCHEMAS.items():  # as Arrow has them: tuples would go through workers
            rows = pa.Table.from_pylist(self.frames[name], to_arrow_schema(schema, timezone="UTC"))
            frames[name] = spark.createDataFrame(rows).coalesce(1)  # each task of Python costs 80 ms
        return History(frames, frozenset([OURS]), self.as_of, self.recorded)

    def write(self, spark: Any, folder: str) -> None:
        """Write the history to a folder."""
        from outbox.pipeline.spark.history import write_metadata

        for name, frame in self.history(spark).frames.items():
            frame.write.parquet(f"{folder}/{name}")
        write_metadata(spark, folder, [OURS], self.as_of)

    def audit(self, spark: Any) -> Report:
        """Return what Spark finds, when SQL has found the same: it does not judge recorded topics."""
        from outbox.pipeline.spark.audit import audit

        report = audit(spark, self.config, self.history(spark))
        if not self.config.recorded:
            assert alike(judged_by_sql(self).findings) == alike(report.findings)
        return report


def made_anew() -> World:
    """
    Return the history of an ordered topic that had fewer queues from number 4 on; its broker was made anew behind it, and
    put its clock back behind number 9. Number 7 comes behind 8.
    """
    world = World().set(ordered_topics=["orders"]).add(10)
    for number, queue, pos, minutes in (
        *((number, 1, 5_000 + number, 0) for number in (1, 2, 3)),
        (4, 0, 5_004, 30),
        *((5, 0, 0, 60), (6, 0, 1, 60), (8, 0, 2, 60), (7, 0, 3, 61), (9, 0, 4, 61), (10, 0, 5, 60)),
    ):
        at = START + timedelta(minutes=minutes, seconds=number)
        world.change("broker", {"queue": queue, "pos": pos, "at": at}, number=number)
    return world


def _has(row: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(row.get(name) in value if isinstance(value, list) else row.get(name) == value for name, value in values.items())


def said(report: Report) -> list[tuple[Any, ...]]:
    """Return the findings as kind, stage, group, first, last, count."""
    return [(str(one.kind), str(one.stage), one.group, one.first, one.last, one.count) for one in report.findings]
