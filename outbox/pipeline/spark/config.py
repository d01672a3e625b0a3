"""
The configuration of a job: one frozen object, which Django passes to the job as JSON. The job gets nothing else from Django.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from outbox.pipeline.spark import PipelineError

Reader = Literal["jdbc", "python"]


@dataclass(frozen=True)
class Source:
    """
    The database or folder from which a history is read.

    Args:
        url: `postgresql://…`, or the folder of a history in Parquet.
        reader: for PostgreSQL: `jdbc` (needs the driver's jar) or `python` (psycopg, needs no jar).
        partitions: the number of connections that read a table concurrently.
        fetch_rows: how many rows a connection fetches at once. 0 is not allowed, because it would read outside of the snapshot.
    """

    url: str
    reader: Reader = "jdbc"
    partitions: int = 4
    fetch_rows: int = 10_000

    def __post_init__(self) -> None:
        if self.reader not in ("jdbc", "python"):
            raise PipelineError(f'The reader must be "jdbc" or "python", not {self.reader!r}.')
        if self.fetch_rows < 1 or self.partitions < 1:
            raise PipelineError(
                f"fetch_rows ({self.fetch_rows}) and partitions ({self.partitions}) must be 1 or more. With fetch_rows=0 the "
                "JDBC driver would read in autocommit, outside of the common snapshot, without an error."
            )

    @property
    def is_postgres(self) -> bool:
        return self.url.startswith(("postgresql://", "postgres://"))


@dataclass(frozen=True)
class KafkaCluster:
    """
    A Kafka cluster whose topics are read with Spark's source for Kafka.

    Args:
        name: the alias of the broker.
        client: settings of the Python client, which the driver uses, with passwords.
        java: settings of the Java client, which Spark uses, with passwords.
        topics: the topics whose messages are audited.
        waiting: consumer group -> the topics among them to which it subscribes.
    """

    name: str
    client: dict[str, Any]
    java: dict[str, str]
    topics: list[str]
    waiting: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Business:
    """
    Business rows for each of which a message must have been published.

    Args:
        name: the entry's name in settings; it is the `subject` of findings.
        topic: the topic of the message.
        type: the type of the message as it is sent; empty: any.
        about: label of the model, as in `Message.about`: `shop.order`.
        table: its table, quoted for SQL.
        also: labels of models that inherit from it (multi-table), whose rows are also rows of this table.
        key: an SQL expression for the primary key as text; the table's alias is `b`.
        where: an SQL condition that selects the rows; empty: all of them.
        at: the column with the time when the row was written; empty: unknown.
    """

    name: str
    topic: str
    about: str
    type: str = ""
    table: str = ""
    key: str = "b.id::text"
    where: str = ""
    at: str = ""
    also: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AuditedGroup:
    """
    A consumer group. It must have an inbox row for each message of its topics, whatever the message's tag.

    Args:
        is_from_start: whether the group started at the beginning of its topics. Otherwise, it need not have handled messages
            before the first one that it handled.
    """

    name: str
    topics: list[str]
    is_from_start: bool = True


@dataclass(frozen=True)
class Archived:
    """
    A lake to audit together with the database.

    Args:
        path: the folder of the lake.
        born: when the outbox was installed; no row is older.
        kept_seconds: the age at which rows are pruned without an archive.
        live_since: the time since which the database and brokers are complete without the lake; None: since the installation.
    """

    path: str
    born: datetime
    kept_seconds: float
    live_since: datetime | None


@dataclass(frozen=True)
class PipelineConfig:
    """
    The configuration of an audit; an archive uses only `outbox` and the settings of Spark.

    Args:
        outbox: the database of messages, batches, lanes, inbox and business rows; or a history in files.
        brokers: the databases with the tables of embedded brokers.
        kafka: the Kafka clusters to read.
        kafka_jars: the folder with the jars of Spark's source for Kafka; empty: Spark downloads them.
        business: the business rows that must have messages.
        groups: the consumer groups whose inboxes are audited.
        seen_topics: the topics whose messages at the broker are read. For other topics, the inbox is compared with the outbox.
        recorded: topic among them that the recorder records -> the maximum delay of a message at the broker, in seconds.
        ordered_topics: topics that keep the order of the messages of a key.
        settle_seconds: the settle time; messages younger than this count as in flight, and not as lost.
        clock_tolerance_seconds: the maximum difference between the clocks of the machines.
        since: do not audit messages that were published earlier, since they may have been pruned; None: the history is complete.
        archived: also audit this lake. It determines the start of the audit, unless `since` is later.
        ids_per_finding: the maximum number of message ids in one finding.
        shuffle_partitions: the number of tasks after a shuffle, and the maximum number of tasks of a scan of files.
    """

    outbox: Source
    brokers: list[Source] = field(default_factory=list)
    kafka: list[KafkaCluster] = field(default_factory=list)
    kafka_jars: str = ""
    business: list[Business] = field(default_factory=list)
    groups: list[AuditedGroup] = field(default_factory=list)
    seen_topics: list[str] = field(default_factory=list)
    recorded: dict[str, float] = field(default_factory=dict)
    ordered_topics: list[str] = field(default_factory=list)
    settle_seconds: float = 300.0
    clock_tolerance_seconds: float = 5.0
    since: datetime | None = None
    archived: Archived | None = None
    ids_per_finding: int = 100
    master: str = "local[2]"
    driver_memory: str = "2g"
    shuffle_partitions: int = 4

    def to_json(self) -> str:
        """Return the configuration as JSON. It contains passwords, so only its user may read a file with it."""
        return json.dumps(asdict(self), default=datetime.isoformat, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PipelineConfig:
        """
        Return the configuration that `to_json` has written.

        Raises:
            PipelineError: the text is not JSON, a name is unknown or missing, or a value is invalid.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            raw["outbox"] = Source(**raw["outbox"])
            for name, kind in {"brokers": Source, "kafka": KafkaCluster, "business": Business, "groups": AuditedGroup}.items():
                raw[name] = [kind(**entry) for entry in raw.get(name, [])]
            if raw.get("archived"):
                raw["archived"] = Archived(**_with_times(raw["archived"], "born", "live_since"))
            raw = _with_times(raw, "since")
            return cls(**raw)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PipelineError(f"The configuration cannot be read: {type(error).__name__}: {error}") from error

    @classmethod
    def from_file(cls, path: Path) -> PipelineConfig:
        """Return the configuration in a file. Raises PipelineError."""
        try:
            return cls.from_json(path.read_text())
        except OSError as error:
            raise PipelineError(f"The configuration {path} cannot be read: {error}") from error


def _with_times(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: datetime.fromisoformat(value) if name in names and value else value for name, value in raw.items()}
