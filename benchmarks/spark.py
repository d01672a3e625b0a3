"""
The audit: how long, how much memory, how much moves between tasks, and whether it is right; beside it DuckDB and plain SQL.

Made-up histories in Parquet of three sizes, each also with faults in 2 % of its messages, and a day of messages in PostgreSQL.
DuckDB and SQL answer the core of the question (which numbers are missing at which hop), not all of it: no ids, repeats, orphans,
business rows or counts.
Seconds are the wall's; on a machine that does other things as well, the note's CPU seconds tell more.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import django

from benchmarks.archive import DAY, EMPTY, fill_day, missing
from benchmarks.figure import Figure
from benchmarks.memory import peak_mib
from benchmarks.synthetic.plan import Plan
from outbox import database
from outbox.pipeline.job_config import database_source
from outbox.pipeline.spark.config import AuditedGroup, PipelineConfig
from outbox.pipeline.spark.jobs import run_job

SIZES = (100_000, 1_000_000, 10_000_000)
ROWS = 500_000  # in PostgreSQL

# Numbers given out that are at no stage, and numbers that got as far as one stage and not to the next.
MISSING = """
WITH o AS (SELECT DISTINCT topic, lane, number FROM read_parquet('{folder}/places/*.parquet')),
b AS (SELECT DISTINCT topic, lane, number FROM read_parquet('{folder}/broker/*.parquet')),
i AS (SELECT DISTINCT topic, lane, number FROM read_parquet('{folder}/inbox/*.parquet')),
m AS (SELECT sum(last - first + 1) AS n FROM read_parquet('{folder}/marks/*.parquet'))
SELECT (SELECT n FROM m) - (SELECT count(*) FROM (FROM o UNION FROM b UNION FROM i)),
    (SELECT count(*) FROM o ANTI JOIN b USING (topic, lane, number)),
    (SELECT count(*) FROM b ANTI JOIN i USING (topic, lane, number))
"""

# Messages that were sent and that the group has not handled.
UNHANDLED = """
SELECT count(*) FROM outbox_batch b, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE b.state = 3 AND u.n <> ALL(b.split)
AND NOT EXISTS (SELECT FROM outbox_inbox i WHERE i.consumer_group = 'bench' AND i.message_id = u.id)
"""


def measure(scale: float = 1.0) -> list[Figure]:
    """Measure everything, or report why Spark cannot run."""
    if reason := missing():
        print(f"    not measured: {reason}", file=sys.stderr)
        return []
    figures = []
    for size in SIZES:
        figures += [*_parquet(int(size * scale), is_largest=size == SIZES[-1]), _sick(int(size * scale))]
    return [*figures, *_postgres(int(ROWS * scale))]


def _parquet(messages: int, *, is_largest: bool) -> list[Figure]:
    """Write a history, start a new session, audit it."""
    from benchmarks.synthetic.write import config_of

    plan = Plan(messages, lost=2_000, duplicated=200, orphans=200, topics=4, lanes=4, seed=7)
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        config = config_of(plan, folder)
        truth = _elsewhere(_write, plan, config, folder)
        found = _elsewhere(_audit, config, folder, truth)
        name = f"audit of {messages:,} messages, 4 stages"
        figures = _beside_duckdb(name, folder, found)
    if not is_largest:
        return figures
    return [
        *figures,
        Figure("audit: the same, in 12 s", found["seconds"], "s", 12, at_most=True, note=found["note"]),
        Figure("audit: once more in the same session", found["again"], "s", 12, at_most=True),
        Figure("audit: peak memory, JVM and workers", found["mib"], "MiB", 4096, at_most=True),
        Figure("audit: shuffled by the hops", found["shuffled"] / 1e6, "MB", 1, at_most=True),
        Figure("audit: faults missed or invented", found["wrong"], "", 0, at_most=True, note=f"{len(truth['findings'])} ranges"),
    ]


def _sick(messages: int) -> Figure:
    """Audit a history in which 2 % of the messages have a fault of their own, by the job: from its start to its report."""
    from benchmarks.synthetic.write import config_of

    lost, duplicated, orphans = (messages * share // 1000 for share in (14, 3, 3))
    plan = Plan(messages, lost=lost, duplicated=duplicated, orphans=orphans, topics=4, lanes=4, burst=1, seed=7)
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        config = config_of(plan, folder)
        truth = _elsewhere(_write, plan, config, folder)
        result = run_job("audit", config.to_json(), log=lambda line: None)
    if result.report is None:
        raise RuntimeError(result.log_tail)
    wrong = len(_shapes(result.report["findings"]) ^ _shapes(truth["findings"]))
    steps = ", ".join(f"{name} {seconds:g} s" for name, seconds in result.report["steps"].items())
    note = f"{len(truth['findings']):,} ranges, {wrong} missed or invented; {steps}"
    name = f"audit of {messages:,} messages, 2 % with faults, from start to end, a million"
    return Figure(name, result.report["seconds"] / messages * 1e6, "s", None, at_most=True, note=note)


def _elsewhere(act: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a separate process: a JVM lives as long as its process, with its compiled code and its peak of memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=django.setup) as process:
        return process.submit(act, *arguments).result()


def _write(plan: Plan, config: PipelineConfig, folder: str) -> dict[str, Any]:
    from benchmarks.synthetic.write import write_history
    from outbox.pipeline.spark.session import build_session

    truth = write_history(build_session(config, name="outbox bench"), plan, folder)
    os.sync()  # or the disk is still being written to while the audit runs
    return truth


def _audit(config: PipelineConfig, folder: str, truth: dict[str, Any]) -> dict[str, Any]:
    from outbox.pipeline.spark.audit import audit
    from outbox.pipeline.spark.history import open_history
    from outbox.pipeline.spark.lanes import audit_lanes
    from outbox.pipeline.spark.session import build_session

    spark: Any = build_session(config, name="outbox bench", is_light=True)  # as the job does
    try:
        java = spark._jvm.java.lang.ProcessHandle.current().pid()
        history = open_history(spark, folder)
        cpu_before = _cpu_seconds(java)
        report, seconds = _timed(lambda: audit(spark, config, history))
        cpu = _cpu_seconds(java) - cpu_before
        _, again = _timed(lambda: audit(spark, config, history))
        before = _shuffled(spark)
        audit_lanes(spark, config, history)
        load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        return {
            "seconds": seconds,
            "again": again,
            "mib": sum(peak_mib(pid) for pid in _with_workers(java)),
            "shuffled": _shuffled(spark) - before,
            "wrong": len(_shapes(finding.as_dict() for finding in report.findings) ^ _shapes(truth["findings"])),
            "note": f"{cpu:.1f} s of CPU, Python's workers included; once more in the same session: {again:.1f} s; {load}",
        }
    finally:
        spark.stop()


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return act(), time.monotonic() - started


def _cpu_seconds(java: int) -> float:
    """Read the resources that the JVM and its workers have used. Linux."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in _with_workers(java)]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def _with_workers(java: int) -> list[int]:
    """Return the live processes of the JVM, its daemon and the daemon's workers. Linux."""
    found = [java]
    for pid in found:
        children = Path(f"/proc/{pid}/task").glob("*/children")
        named = [child for file in children for child in file.read_text().split()]
        found += [int(child) for child in named if Path(f"/proc/{child}/statm").read_text().split()[0] != "0"]
    return found


def _shuffled(spark: Any) -> int:
    """Return the bytes of all shuffle writes so far."""
    context, gateway = spark._jsc.sc(), spark.sparkContext._gateway
    context.listenerBus().waitUntilEmpty()
    quantiles, tasks = gateway.new_array(gateway.jvm.double, 0), gateway.jvm.java.util.ArrayList()
    stages = context.statusStore().stageList(None, False, False, quantiles, tasks)
    return sum(stages.apply(n).shuffleWriteBytes() for n in range(stages.size()))


def _shapes(findings: Iterable[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """Return the findings about numbers of lanes, for comparison."""
    names = ("kind", "stage", "topic", "lane", "group", "first", "last", "count")
    return {tuple(finding[name] for name in names) for finding in findings if finding["lane"] is not None}


def _beside_duckdb(name: str, folder: str, found: dict[str, Any]) -> list[Figure]:
    if importlib.util.find_spec("duckdb") is None:
        return [Figure(name, found["seconds"], "s", None, at_most=True, note=f"{found['note']}; DuckDB is not installed")]
    import duckdb

    connection = duckdb.connect(config={"threads": 2})
    lost, seconds = _timed(lambda: connection.execute(MISSING.format(folder=folder)).fetchone())
    note = f"{found['note']}; bound: DuckDB, which counts {lost} at outbox, broker, inbox, and names none"
    return [Figure(name, found["seconds"], "s", None, at_most=True, bound=seconds, note=note)]


def _postgres(messages: int) -> list[Figure]:
    """Audit a day in PostgreSQL: compare its read with a bare JDBC read, and all of it with plain SQL."""
    from outbox.pipeline.spark.audit import audit
    from outbox.pipeline.spark.history import open_history
    from outbox.pipeline.spark.postgres import copy_history
    from outbox.pipeline.spark.session import build_session

    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder, database.connect("default") as connection:
        fill_day(connection, DAY - timedelta(days=1), 5_000)  # what Spark gets warm with
        fill_day(connection, DAY, messages)
        config = PipelineConfig(database_source("default"), groups=[AuditedGroup("bench", ["bench-archive"])])
        spark = build_session(config, name="outbox bench")
        try:
            bare = _time_bare(spark, config) if config.outbox.reader == "jdbc" else None
            _, read = _timed(lambda: copy_history(spark, config, folder))
            _, audited = _timed(lambda: audit(spark, config, open_history(spark, folder)))
            _, sql = _timed(lambda: connection.execute(UNHANDLED).fetchone())
        finally:
            spark.stop()
            connection.execute(EMPTY)
    by_psycopg = "by psycopg: JDBC opens no socket file. Name a host in DATABASE_URL to hold it to JDBC"
    note = "bound: bare JDBC" if bare else by_psycopg
    return [
        Figure(f"audit: {messages:,} read from PostgreSQL", read, "s", None, at_most=True, bound=bare, note=note),
        Figure(
            f"audit: {messages:,} in PostgreSQL, all",
            read + audited,
            "s",
            None,
            at_most=True,
            bound=sql,
            note="bound: SQL that counts what the group has not handled",
        ),
    ]


def _time_bare(spark: Any, config: PipelineConfig) -> float:
    _read_bare(spark, config)  # warms up
    return _timed(lambda: _read_bare(spark, config))[1]


def _read_bare(spark: Any, config: PipelineConfig) -> None:
    """Read the tables of a history over four connections, without a common snapshot, and discard the rows."""
    from outbox.pipeline.spark import statements
    from outbox.pipeline.spark.readers import DRIVER, jdbc_url

    url, login = jdbc_url(config.outbox.url)
    with database.connect("default") as connection:
        for statement in statements.OUTBOX.values():
            low, high = connection.execute(statement.bounds).fetchone() or (0, 0)
            reader = spark.read.format("jdbc").options(url=url, driver=DRIVER, fetchsize=10_000, **login)
            reader = reader.options(dbtable=f"({statement.query}) AS frame")
            if (high or 0) > (low or 0):
                reader = reader.options(partitionColumn="part", lowerBound=low, upperBound=high + 1, numPartitions=4)
            reader.load().write.format("noop").mode("overwrite").save()
