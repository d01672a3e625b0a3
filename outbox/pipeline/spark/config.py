"""
What a job is told: everything, in one frozen object that travels as JSON.

Nothing else crosses from Django to Spark.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from outbox.pipeline.spark.errors import PipelineError

Reader = Literal["jdbc", "python"]


@dataclass(frozen=True)
class Source:
    """
    Where a history lies.

    Args:
        url: `postgresql://…`, or the folder of a history in Parquet.
        reader: for PostgreSQL: `jdbc` (needs the driver's jar) or `python` (psycopg, needs no jar).
        jar: path of the JDBC driver; empty: looked for where Debian puts it.
        partitions: so many connections read a table at once.
        fetch_rows: rows fetched at once, per connection. 0 would read outside of the snapshot, and is refused.
    """

    url: str
    reader: Reader = "jdbc"
    jar: str = ""
    partitions: int = 4
    fetch_rows: int = 10_000

    def __post_init__(self) -> None:
        if self.reader not in ("jdbc", "python"):
            raise PipelineError(f'The reader is "jdbc" or "python", not {self.reader!r}.')
        if self.fetch_rows < 1 or self.partitions < 1:
            raise PipelineError(
                f"fetch_rows ({self.fetch_rows}) and partitions ({self.partitions}) are 1 or more. With fetch_rows=0 the "
                "JDBC driver reads in autocommit, outside of the common snapshot, and says nothing."
            )

    @property
    def is_postgres(self) -> bool:
        return self.url.startswith(("postgresql://", "postgres://"))


@dataclass(frozen=True)
class Business:
    """
    Business rows each of which owes the world a message.

    Args:
        name: the entry's name in settings; findings carry it.
        topic: where its message goes.
        type: the message's type on the wire; empty: any.
        about: label of the model, as messages name it: `shop.order`.
        table: its table, quoted as SQL needs it.
        key: the primary key's column.
        where: SQL that chooses the rows that owe a message; empty: all do.
        at: the column that says when the row was written; empty: unknown.
    """

    name: str
    topic: str
    about: str
    type: str = ""
    table: str = ""
    key: str = "id"
    where: str = ""
    at: str = ""


@dataclass(frozen=True)
class Group:
    """
    A consumer group that owes each message of its topics an inbox row, of whatever tag.

    Args:
        is_from_start: False: it began behind what lay there before; what it has not seen below its first number is not its.
    """

    name: str
    topics: list[str]
    is_from_start: bool = True


@dataclass(frozen=True)
class Archived:
    """
    The lake that has what the database has let go of.

    Args:
        path: its folder.
        born: when the outbox was made; nothing of it is older.
        kept_seconds: without an archive, rows are pruned when they are as old.
        live_since: from when on the database, and its brokers' tables, are whole without the lake; None: they always were.
    """

    path: str
    born: datetime
    kept_seconds: float
    live_since: datetime | None


@dataclass(frozen=True)
class PipelineConfig:
    """
    Args:
        outbox: where messages, batches, lanes, inbox and business rows lie.
        brokers: where what a broker stored was written down: the embedded broker's tables, or the recorder's.
        seen_topics: topics whose broker side stands there; of others the inbox is held to the outbox itself.
        recorded: those of them that the recorder writes down -> how many seconds a message may stay hidden at the broker.
        ordered_topics: topics that keep the order of a key.
        settle_seconds: what is younger is under way, not lost.
        clock_tolerance_seconds: clocks may differ by so much.
        since: what was published before is not audited (it may have been pruned); None: the history is whole.
        archived: what is in this lake is audited, too; from when on, the lake says, and `since` only if it is later.
        ids_per_finding: name at most so many message ids of one finding.
    """

    outbox: Source
    brokers: list[Source] = field(default_factory=list)
    business: list[Business] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
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
        """Write everything; passwords in URLs included, so whoever stores it makes it unreadable for others."""
        return json.dumps(asdict(self), default=datetime.isoformat, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PipelineConfig:
        """
        Read what `to_json` wrote.

        Raises:
            PipelineError: it is not JSON, a name is unknown or missing, or a value is impossible.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            raw["outbox"] = Source(**raw["outbox"])
            raw["brokers"] = [Source(**entry) for entry in raw.get("brokers", [])]
            raw["business"] = [Business(**entry) for entry in raw.get("business", [])]
            raw["groups"] = [Group(**entry) for entry in raw.get("groups", [])]
            if raw.get("archived"):
                raw["archived"] = Archived(**_with_times(raw["archived"], "born", "live_since"))
            raw = _with_times(raw, "since")
            return cls(**raw)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PipelineError(f"The configuration cannot be read: {type(error).__name__}: {error}") from error

    @classmethod
    def from_file(cls, path: Path) -> PipelineConfig:
        """Read a file that `to_json` filled. Raises PipelineError."""
        try:
            return cls.from_json(path.read_text())
        except OSError as error:
            raise PipelineError(f"The configuration {path} cannot be read: {error}") from error


def _with_times(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: datetime.fromisoformat(value) if name in names and value else value for name, value in raw.items()}
