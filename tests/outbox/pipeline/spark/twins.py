"""A world of `worlds`, judged by SQL: its rows go into the frames as they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox.pipeline.spark.findings import Breach, FindingKind
from tests.outbox.pipeline.sql.frames import Check, opened
from tests.outbox.pipeline.sql.judge import Answer, judge

if TYPE_CHECKING:
    from tests.outbox.pipeline.spark.worlds import World

OURS = "urn:uuid:ours"


def judged_by_sql(world: World) -> Answer:
    """Return what SQL finds in a world."""
    with filled(world) as check:
        return judge(check, world.config, as_of=world.as_of, since=world.config.since, sources=[OURS])


@contextmanager
def filled(world: World) -> Iterator[Check]:
    """Put a world's rows into the frames."""
    with opened("default") as check:
        check.describe(world.config)
        for name, rows in world.frames.items():
            columns = [column.name for column in check.run(f"SELECT * FROM quick_{name} LIMIT 0").description or ()]
            with check.connection.cursor() as cursor, cursor.copy(f"COPY quick_{name} FROM STDIN".encode()) as copy:
                for row in rows:
                    copy.write_row([row.get(column) for column in columns])
        yield check


def alike(findings: Iterable[Breach]) -> list[tuple[Any, ...]]:
    """Return all that findings say, so that two answers can be compared. Clocks are Spark's alone, but for latencies."""
    return sorted(
        (str(one.kind), str(one.stage), one.topic, one.source, one.lane, one.group, one.subject, *_numbers(one))
        for one in findings
        if one.kind is not FindingKind.CLOCK
    )


def _numbers(one: Breach) -> tuple[Any, ...]:
    return one.first, one.last, one.count, one.detail, one.ids, one.about
