"""The configuration of Spark jobs, made from Django's settings: one `PipelineConfig`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction

from outbox import conf, database
from outbox.brokers.capabilities import SpeaksKafka, StoredInDatabase
from outbox.consuming.register import groups
from outbox.errors import ConfigurationError
from outbox.message import TopicType
from outbox.pipeline.business import business_of, place_of
from outbox.pipeline.conf import AuditSettings, settings
from outbox.pipeline.kafka_java import java_settings
from outbox.pipeline.models import RecordedTopic
from outbox.pipeline.spark.config import Archived, AuditedGroup, Business, KafkaCluster, PipelineConfig, Reader, Source
from outbox.pipeline.spark.sources.statements import of_business

# When the outbox was installed in this database. Nothing older can have been pruned.
INSTALLED_AT = "SELECT min(applied) FROM django_migrations WHERE app = 'outbox'"

# The first day of messages that has a partition. All days before it were dropped.
FIND_OLDEST_DAY = """
SELECT min(right(c.relname, 8)) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_message'::regclass AND c.relname <> 'outbox_message_default'
"""


def pipeline_config(
    using: str = DEFAULT_DB_ALIAS, *, reader: Reader = "jdbc", settle: timedelta, archived: bool = False, **more: Any
) -> PipelineConfig:
    """
    Return the configuration for a database: its outbox, brokers, business rows and consumer groups.

    Args:
        reader: for a server behind a Unix socket, `python` is used instead of `jdbc`, which does not support sockets.
        archived: also audit archived days.
        more: other fields of `PipelineConfig`.

    Raises:
        ConfigurationError: an entry of `OUTBOX["PIPELINE"]["AUDIT"]` is wrong, by its names or for the database; or there is no
            archive.
    """
    databases = {alias: database_source(alias, reader) for alias in {using, *readable_brokers().values()}}
    if archived:
        more["archived"] = _archived(using)
    else:
        more.setdefault("since", _complete_since(using))
    seen = [topic for broker in readable_brokers() for topic in _topics_of(broker)]
    recorded = _recorded(using, but=seen)
    kafka = [_kafka_cluster(alias, client, using, but=recorded) for alias, client in kafka_brokers().items()]
    kafka = [cluster for cluster in kafka if cluster.topics]
    seen += [topic for cluster in kafka for topic in cluster.topics]
    return PipelineConfig(
        outbox=databases[using],
        brokers=[databases[alias] for alias in sorted(set(readable_brokers().values()))],
        kafka=kafka,
        kafka_jars=settings().kafka_jars,
        business=[_business(using, name, entry) for name, entry in settings().audit.items()],
        groups=_groups(using),
        seen_topics=[*seen, *recorded],
        recorded=recorded,
        ordered_topics=[name for name in sorted(conf.settings().topics) if conf.topic_settings(name).type is TopicType.FIFO],
        settle_seconds=settle.total_seconds(),
        **more,
    )


def _business(using: str, name: str, entry: AuditSettings) -> Business:
    """Return what the jobs read for an entry. One row is read now, so that wrong SQL is an error before Spark starts."""
    business = business_of(name, entry)
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(f"SELECT * FROM ({of_business(business).query}) b LIMIT 1")  # noqa: S608  (settings are trusted)
    except DatabaseError as error:
        reason = str(error).strip().splitlines()[0]
        hint = "Correct MODEL, AT or WHERE; run migrate if a table is missing."
        raise ConfigurationError(f"{place_of(name)} cannot be read from database {using!r}: {reason}.", hint=hint) from error
    return business


def readable_brokers() -> dict[str, str]:
    """Return the brokers that keep messages in database tables, which the jobs can read: broker -> database alias."""
    used = sorted({topic.broker for topic in conf.settings().topics.values()})
    return {alias: conf.stored_in(alias) for alias in used if issubclass(conf.broker_class(alias), StoredInDatabase)}


def kafka_brokers() -> dict[str, dict[str, Any]]:
    """Return the brokers whose topics Spark's source for Kafka can read, with the settings of a client."""
    used = sorted({topic.broker for topic in conf.settings().topics.values()})
    options_of = {alias: conf.settings().brokers[alias].options for alias in used}
    return {
        alias: {**options.get("CLIENT", {}), "bootstrap.servers": ",".join(options["SERVERS"])}
        for alias, options in options_of.items()
        if issubclass(conf.broker_class(alias), SpeaksKafka)
    }


def _kafka_cluster(alias: str, client: dict[str, Any], using: str, *, but: Collection[str]) -> KafkaCluster:
    """Return a cluster with its topics, except those that the recorder records, and the topics of the groups of a database."""
    topics = [topic for topic in _topics_of(alias) if topic not in but]
    waiting = {
        group.name: sorted(topic for topic in group.topics if topic in topics)
        for group in groups().values()
        if group.using == using
    }
    waiting = {name: found for name, found in waiting.items() if found}
    try:
        java = java_settings(client) if topics else {}
    except ConfigurationError as error:
        hint = f"Let the recorder read its topics instead: manage.py outbox_record --broker {alias}"
        raise ConfigurationError(f"Spark cannot read broker {alias!r}: {error.message}", hint=hint) from error
    return KafkaCluster(alias, client, java, topics, waiting)


def _recorded(using: str, *, but: Sequence[str]) -> dict[str, float]:
    """Return the recorded topics -> the maximum delay of their messages at the broker, in seconds."""
    names = RecordedTopic.objects.using(using).exclude(topic__in=but).order_by("topic").values_list("topic", flat=True)
    return {name: _max_delay_seconds(name) for name in names if name in conf.settings().topics}


def _max_delay_seconds(topic: str) -> float:
    found = conf.topic_settings(topic)
    is_delayed = found.type is TopicType.DELAY
    return conf.broker_class(found.broker).max_delay.total_seconds() if is_delayed else 0.0


def _topics_of(broker: str) -> Sequence[str]:
    return [topic.name for topic in conf.topics_of(broker)]


def database_source(alias: str, reader: Reader = "jdbc") -> Source:
    """Return how jobs connect to one of Django's databases; the reader is `python` for a Unix socket."""
    with database.connect_session(alias, application_name="outbox audit") as connection:
        info = connection.info
        # Not info.get_parameters(), which fails without a home directory.
        given = [option for option in connection.pgconn.info if option.val not in (None, option.compiled)]
        parameters = {option.keyword.decode(): option.val.decode() for option in given if option.val}
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


def _groups(using: str) -> list[AuditedGroup]:
    """Return the groups whose inbox is in this database."""
    found = []
    for group in groups().values():
        if group.using == using:
            found.append(AuditedGroup(group.name, sorted(group.topics), is_from_start=not _starts_at_latest(group.topics)))
    return found


def _starts_at_latest(topics: Any) -> bool:
    brokers = [conf.settings().brokers[conf.topic_settings(topic).broker] for topic in topics]
    return any(broker.options.get("START") == "latest" for broker in brokers)


def _complete_since(using: str) -> datetime | None:
    """Return from when on the history is complete. None: it has never been pruned."""
    all_settings = conf.settings()
    now, installed_at, oldest = datetime.now(UTC), _installed_at(using), _oldest_day(using)
    kept = min([all_settings.retention, *(topic.retention for topic in all_settings.topics.values())])
    if installed_at and oldest and oldest.date() > installed_at.date():  # days were dropped, maybe by a shorter retention
        kept = min(kept, now - oldest)
    since = now - kept + min(kept / 4, timedelta(days=1))
    return None if installed_at is None or installed_at > since else since


def _oldest_day(using: str) -> datetime | None:
    with connections[using].cursor() as cursor:
        cursor.execute(FIND_OLDEST_DAY)
        name: str | None = cursor.fetchone()[0]
    return datetime.strptime(name, "%Y%m%d").replace(tzinfo=UTC) if name else None


def _installed_at(using: str) -> datetime | None:
    with connections[using].cursor() as cursor:
        cursor.execute(INSTALLED_AT)
        [installed_at] = cursor.fetchone()
    return None if installed_at is None else database.aware(installed_at)


def _archived(using: str) -> Archived:
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive to audit: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.')
    path = Path(archive.path, using)
    return Archived(
        str(path), _installed_at(using) or datetime.now(UTC), conf.settings().retention.total_seconds(), _complete_since(using)
    )
