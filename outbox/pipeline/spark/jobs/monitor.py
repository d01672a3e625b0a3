"""
The monitor as a job: `python -m outbox.pipeline.spark.jobs.monitor --config monitor.json --checkpoint FOLDER`. It applies what
was written since the last time and ends; with `--every SECONDS` it goes on until it is stopped. Exit code: 0 done or stopped,
2 it could not go on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.jobs import parent
from outbox.pipeline.spark.jobs.end import describe
from outbox.pipeline.spark.keep import kept_alive
from outbox.pipeline.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# One monitor of a database at a time; the lock ends with the connection.
TRY_MONITOR_LOCK = f"SELECT pg_try_advisory_lock({Lock.MONITOR}, 0)"

START_SECONDS = 120.0
BATCH_SECONDS = 30.0  # who is told to stop waits so long for the micro-batch under way

OLDEST_SPARK = (4, 2)  # before it, a Python source was not told where its stream stands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the monitor as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON, as PipelineConfig.to_json writes it")
    parser.add_argument("--checkpoint", required=True, metavar="FOLDER", help="how far it has come; another one begins anew")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="go on, a micro-batch as often (default: one, and end)")
    parser.add_argument("--with-parent", action="store_true", help=parent.HELP)
    options = parser.parse_args(arguments)
    is_stopped = watch_for_the_end(options.with_parent)
    try:
        config = PipelineConfig.from_file(options.config)
        run(config, options.checkpoint, every=options.every, is_stopped=is_stopped)
    except PipelineError as error:
        _say(f"The monitor cannot go on: {error}")
        return 2
    except Exception as error:
        _say(f"The monitor cannot go on: {describe(error)}")
        return 2
    return 0


def run(config: PipelineConfig, checkpoint: str, *, every: float | None, is_stopped: Callable[[], bool]) -> None:
    """Apply what was written since, in a session of its own. Raises PipelineError."""
    config = replace(config, outbox=replace(config.outbox, reader="python"), brokers=[])
    with _turn(config.outbox.url):
        _say("starting Spark")
        spark = build_session(config, name="outbox monitor")
        try:
            stream(spark, config, checkpoint, every=every, is_stopped=is_stopped)
        finally:
            spark.stop()


def stream(
    spark: SparkSession, config: PipelineConfig, checkpoint: str, *, every: float | None, is_stopped: Callable[[], bool]
) -> None:
    """Run the query until all is applied, or until stopped. Raises PipelineError."""
    _require_version()
    # In here: behind `build_session`, which says what to install where pyspark is missing or too old.
    from pyspark.errors import StreamingQueryException

    from outbox.pipeline.spark.monitor.aggregate import aggregate, changes_of
    from outbox.pipeline.spark.monitor.changes import NAME, ChangesSource
    from outbox.pipeline.spark.monitor.write import apply

    job: Future[str] = Future()  # Spark's id of the query, which lies in the checkpoint: known once it has started
    groups = groups_by_topic(config)
    troubles: list[Exception] = []

    def apply_batch(changes: Any, batch: int) -> None:
        try:
            rows = changes_of(aggregate(changes).collect())
            is_new = apply(config.outbox.url, job.result(START_SECONDS), batch, rows, groups)
            _say(f"batch {batch}: {sum(row.n for row in rows)} rows{'' if is_new else ', which were applied before'}")
        except Exception as error:
            troubles.append(error)
            raise

    spark.dataSource.register(ChangesSource)
    changes = spark.readStream.format(NAME).options(url=config.outbox.url, fetchrows=str(config.outbox.fetch_rows)).load()
    writer = changes.writeStream.foreachBatch(apply_batch).option("checkpointLocation", checkpoint)
    trigger = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=f"{every} seconds")
    query = trigger.start()
    job.set_result(str(query.id))
    try:
        while not query.awaitTermination(0.5):
            if is_stopped():
                _end(query)
    except StreamingQueryException as error:
        raise _explained(troubles, error) from error


def _end(query: Any) -> None:
    """Stop a query between two micro-batches; in the middle of one only if it takes too long: it comes again then."""
    deadline = time.monotonic() + BATCH_SECONDS
    while query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    query.stop()


def _require_version() -> None:
    import pyspark  # in here for the same reason

    if tuple(map(int, pyspark.__version__.split(".")[:2])) < OLDEST_SPARK:
        oldest = ".".join(map(str, OLDEST_SPARK))
        raise PipelineError(f"The monitor needs pyspark {oldest} or newer, and this is {pyspark.__version__}.")


def groups_by_topic(config: PipelineConfig) -> dict[str, list[str]]:
    """Return topic -> the groups that owe each of its messages an inbox row: those that began with the first."""
    found: dict[str, list[str]] = {}
    for group in config.groups:
        for topic in group.topics if group.is_from_start else ():
            found.setdefault(topic, []).append(group.name)
    return found


def _explained(troubles: list[Exception], error: Exception) -> PipelineError:
    if troubles and isinstance(troubles[-1], PipelineError):
        return troubles[-1]
    said = troubles[-1] if troubles else error
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    telling = [line for line in lines if "rror:" in line]
    return PipelineError(f"{type(said).__name__}: {(telling or lines or ['it says nothing'])[-1]}")


@contextmanager
def _turn(url: str) -> Iterator[None]:
    try:
        connection = psycopg.connect(url, application_name="outbox monitor", autocommit=True)
    except psycopg.Error as error:
        raise PipelineError(f"The database cannot be reached: {str(error).strip()}") from error
    with connection:
        if connection.execute(TRY_MONITOR_LOCK).fetchone() != (True,):
            raise PipelineError("Another monitor of this database is at work. One at a time does.")
        connection.execute(END_IDLE_SESSION)
        with kept_alive(connection):
            yield


def watch_for_the_end(with_parent: bool) -> Callable[[], bool]:
    """Return a function that returns whether SIGTERM or SIGINT came, or standard input ended."""
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: caught.append(number))
    ended = threading.Event()
    if with_parent:
        parent.when_it_ends(ended.set)
    return lambda: bool(caught) or ended.is_set()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
