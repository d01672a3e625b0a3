"""What the Spark jobs need to know, from Django's settings: one `PipelineConfig`. Nothing else crosses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, connections

from outbox import conf, database
from outbox.brokers.capabilities import StoredInDatabase
from outbox.consuming.register import groups
from outbox.errors import ConfigurationError
from outbox.message import TopicType, message_type
from outbox.pipeline.conf import AuditSettings, settings
from outbox.pipeline.models import RecordedTopic
from outbox.pipeline.spark.config import Archived, Business, Group, PipelineConfig, Reader, Source

# When this database's outbox was made. Nothing older than that can have been pruned.
BORN = "SELECT min(applied) FROM django_migrations WHERE app = 'outbox'"

# The first day of messages that has a partition; all others that were before it were dropped.
FIND_OLDEST_DAY = """
SELECT min(right(c.relname, 8)) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_message'::regclass AND c.relname <> 'outbox_message_default'
"""


def pipeline_config(
    using: str = DEFAULT_DB_ALIAS, *, reader: Reader = "jdbc", settle: timedelta, archived: bool = False, **more: Any
) -> PipelineConfig:
    """
    Describe a database's outbox, its brokers, business rows and consumer groups.

    Args:
        reader: `jdbc` becomes `python` where the server is reached by a socket, which Java does not do.
        archived: what was archived is audited, too.
        more: fields of `PipelineConfig`, as they are.

    Raises:
        ConfigurationError: an entry of `OUTBOX["PIPELINE"]["AUDIT"]` names what is not there; or there is no archive.
    """
    databases = {alias: database_source(alias, reader) for alias in {using, *readable_brokers().values()}}
    if archived:
        more["archived"] = _archived(using)
    else:
        more.setdefault("since", _whole_since(using))
    seen = [topic for broker in readable_brokers() for topic in _topics_of(broker)]
    recorded = _recorded(using, but=seen)
    return PipelineConfig(
        outbox=databases[using],
        brokers=[databases[alias] for alias in sorted(set(readable_brokers().values()))],
        business=[_business(name, entry) for name, entry in settings().audit.items()],
        groups=_groups(using),
        seen_topics=[*seen, *recorded],
        recorded=recorded,
        ordered_topics=[name for name in sorted(conf.settings().topics) if conf.topic_settings(name).type is TopicType.FIFO],
        settle_seconds=settle.total_seconds(),
        **more,
    )


def readable_brokers() -> dict[str, str]:
    """Return the brokers with topics that keep their messages in tables, which the jobs read themselves: broker -> database."""
    used = sorted({topic.broker for topic in conf.settings().topics.values()})
    kinds = {alias: conf.broker_class(alias) for alias in used}
    return {
        alias: StoredInDatabase.of(kind).stored_in(conf.settings().brokers[alias].options)
        for alias, kind in kinds.items()
        if kind.is_stored_in_database
    }


def _recorded(using: str, *, but: Sequence[str]) -> dict[str, float]:
    """Return the topics that a recorder writes down -> for how many seconds their broker may hide a message."""
    names = RecordedTopic.objects.using(using).exclude(topic__in=but).order_by("topic").values_list("topic", flat=True)
    return {name: _hidden_seconds(name) for name in names if name in conf.settings().topics}


def _hidden_seconds(topic: str) -> float:
    found = conf.topic_settings(topic)
    is_delayed = found.type is TopicType.DELAY
    return conf.broker_class(found.broker).max_delay.total_seconds() if is_delayed else 0.0


def _topics_of(broker: str) -> Sequence[str]:
    return [topic.name for topic in conf.topics_of(broker)]


def database_source(alias: str, reader: Reader = "jdbc") -> Source:
    """Return how jobs reach one of Django's databases; by `python` where it is behind a socket file."""
    with database.connect_session(alias, application_name="outbox audit") as connection:
        info = connection.info
        parameters = info.get_parameters()
        login = quote(info.user, safe="")
        if info.password:
            login += f":{quote(info.password, safe='')}"
        name = quote(info.dbname, safe="")
        query: dict[str, str | int] = {key: parameters[key] for key in ("sslmode", "sslrootcert") if key in parameters}
        if info.host.startswith("/"):
            url = f"postgresql://{login}@/{name}?{urlencode({**query, 'host': info.host, 'port': info.port})}"
            return Source(url, reader="python")
        url = f"postgresql://{login}@{info.host}:{info.port}/{name}"
        return Source(f"{url}?{urlencode(query)}" if query else url, reader=reader)


def _business(name: str, entry: AuditSettings) -> Business:
    place = f'OUTBOX["PIPELINE"]["AUDIT"]["{name}"]'
    try:
        meta = apps.get_model(entry.model)._meta
    except (LookupError, ValueError) as error:
        raise ConfigurationError(f'{place} names the model {entry.model!r}: {error} Write "app.Model".') from error
    kind = message_type(entry.expects)
    if kind is None:
        raise ConfigurationError(
            f"{place} expects {entry.expects!r}, and no message type is called that on the wire. Write the type's name, and "
            "see to it that its module is imported."
        )
    try:
        at = meta.get_field(entry.at).column if entry.at else ""
    except FieldDoesNotExist as error:
        raise ConfigurationError(f"{place} has AT {entry.at!r}: {error}.") from error
    quoted = connections[DEFAULT_DB_ALIAS].ops.quote_name
    return Business(
        name=name,
        topic=kind._meta.topic,
        type=entry.expects,
        about=meta.label_lower,
        table=quoted(meta.db_table),
        key=quoted(meta.pk.column),
        where=entry.where,
        at=quoted(at) if at else "",
    )


def _groups(using: str) -> list[Group]:
    """Return the groups that keep their inbox in this database."""
    found = []
    for group in groups().values():
        if group.using == using:
            found.append(Group(group.name, sorted(group.topics), is_from_start=not _begins_late(group.topics)))
    return found


def _begins_late(topics: Any) -> bool:
    brokers = [conf.settings().brokers[conf.topic_settings(topic).broker] for topic in topics]
    return any(broker.options.get("START") == "latest" for broker in brokers)


def _whole_since(using: str) -> datetime | None:
    """Return from when on the history is whole; None: it has never been pruned."""
    whole_settings = conf.settings()
    now, born, oldest = datetime.now(UTC), _born(using), _oldest_day(using)
    kept = min([whole_settings.retention, *(topic.retention for topic in whole_settings.topics.values())])
    if born and oldest and oldest.date() > born.date():  # days were dropped, perhaps by a shorter retention than today's
        kept = min(kept, now - oldest)
    whole = now - kept + min(kept / 4, timedelta(days=1))
    return None if born is None or born > whole else whole


def _oldest_day(using: str) -> datetime | None:
    with connections[using].cursor() as cursor:
        cursor.execute(FIND_OLDEST_DAY)
        name: str | None = cursor.fetchone()[0]
    return datetime.strptime(name, "%Y%m%d").replace(tzinfo=UTC) if name else None


def _born(using: str) -> datetime | None:
    with connections[using].cursor() as cursor:
        cursor.execute(BORN)
        born: datetime | None = cursor.fetchone()[0]
    return born


def _archived(using: str) -> Archived:
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive to be audited: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.')
    path = Path(archive.path, using)
    return Archived(str(path), _born(using) or datetime.now(UTC), conf.settings().retention.total_seconds(), _whole_since(using))
