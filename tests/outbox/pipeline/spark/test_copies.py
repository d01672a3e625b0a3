"""What the recorder wrote down, told by Spark as PostgreSQL tells it."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

from outbox.pipeline.spark.archived import copies, once
from outbox.pipeline.spark.lake import RECORDED
from outbox.pipeline.spark.readers import spark_schema
from tests.outbox.pipeline.spark.test_postgres import TestWhatTheRecorderWroteDown as Told

AT = datetime(2026, 1, 1, tzinfo=UTC)


class TestCopies:
    def test_are_those_that_postgresql_counts_with_each_place_once_however_late_it_comes_again(self, spark):
        rows = []

        def see(number, queue, pos, delivery_count, times=1):
            for _ in range(times):
                of = {"id": len(rows), "message_id": f"m{number}", "topic": "bills", "number": number, "lane": 1}
                rows.append(
                    {
                        **of,
                        "queue": queue,
                        "pos": pos,
                        "delivery_count": delivery_count,
                        "recorded_at": AT + timedelta(days=len(rows)),
                    }
                )

        for number, (_, deliveries, _) in enumerate(Told.COPIES, start=1):
            for place in deliveries:
                see(number, *place)
        see(7, "q", 8, 1, times=3)  # its row left the table, and it was handed out again
        see(8, "", None, 1, times=2)  # by a broker that does not say where a message lies
        see(9, "", None, 1)
        rows.append(rows[-1])  # in the database and in the lake
        schema = spark_schema(RECORDED)
        frame = spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema).coalesce(1)

        found = Counter(row.number for row in copies(once(frame)).collect())

        expected = {number: many for number, (_, _, many) in enumerate(Told.COPIES, start=1)}
        assert found == {**expected, 7: 1, 8: 2, 9: 1}
