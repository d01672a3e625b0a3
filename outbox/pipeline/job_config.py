"""
The configuration of Spark jobs, made from Django's settings: one `PipelineConfig`.

    DATABASES, OUTBOX -> PipelineConfig(outbox, brokers, kafka, business, groups, …) -> JSON -> the job

    AUDIT = {"orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "WHERE": "b.total > 0", "AT": "placed_at"}}
    -> Business("orders", topic, "OrderPlaced", "shop.order", table='"shop_order"', key='b."id"::text', …)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router, transaction
from django.db.models import DateTimeField, Field
from django.db.models.options import Options

from outbox import conf, database
from outbox.brokers.capabilities import SpeaksKafka, StoredInDatabase
from outbox.consuming.register import groups
from outbox.errors import ConfigurationError
from outbox.message import Message, TopicType, message_type
from outbox.pipeline.conf import PLACE, AuditSettings, settings
from outbox.pipeline.models import RecordedTopic
from outbox.pipeline.spark.config import Archived, AuditedGroup, Business, KafkaCluster, PipelineConfig, Reader, Source
from outbox.pipeline.spark.statements import of_business
from outbox.publishing.transactions import key_text


def place_of(name: str) -> str:
    """Return how errors name an entry of AUDIT."""
    return f'{PLACE}["AUDIT"]["{name}"]'


def problems_with(entry: AuditSettings) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with an entry, and what to do."""
    if message_type(entry.expects) is None:
        text = f"has EXPECTS {entry.expects!r}, but no message type has this name."
        yield text, "Write the name of the type as it is sent, and make sure that its module is imported."
    try:
        meta = apps.get_model(entry.model)._meta
    except (LookupError, ValueError) as error:
        yield f"has MODEL {entry.model!r}: {error}", 'Write "app.Model".'
        return
    if not _key(meta):
        text = f"has MODEL {entry.model!r}, whose primary key has several columns."
        yield text, "Name a model with a key of one column: the audit finds a row's messages by its key."
    if entry.at and (problem := _problem_with_at(meta, entry.at)):
        yield problem


def _key(meta: Options[Any]) -> str:
    """Return the column of a model's primary key; "" if it has several."""
    return (meta.pk.column if meta.pk is not None else None) or ""


def _problem_with_at(meta: Options[Any], at: str) -> tuple[str, str] | None:
    times = sorted(field.name for field in meta.concrete_fields if isinstance(field, DateTimeField) and _owner(meta, field))
    hint = f"Its date-time fields are {', '.join(times)}." if times else "It has no date-time field: leave AT out."
    try:
        field = meta.get_field(at)
    except FieldDoesNotExist:
        return f"has AT {at!r}, but {meta.object_name} has no such field.", hint
    if not isinstance(field, DateTimeField):
        return f"has AT {at!r}, which is not a date-time field of {meta.object_name}.", hint
    if not _owner(meta, field):
        return f"has AT {at!r}, a field of another parent than the one whose key {meta.object_name} has.", hint
    return None


def _owner(meta: Options[Any], field: Field[Any, Any]) -> Options[Any] | None:
    """Return the model whose table has a field: this one, or a parent with the same key. None: a parent with another key."""
    owner = _concrete(field.model._meta)
    return owner if owner in (_concrete(meta), *_parents(meta)) else None


def _parents(meta: Options[Any]) -> Iterator[Options[Any]]:
    """Yield the models whose rows with the same key are parts of the rows of a model."""
    current = _concrete(meta)
    while (parent := getattr(current.pk, "remote_field", None)) is not None and parent.parent_link:
        current = parent.model._meta
        yield current


def _concrete(meta: Options[Any]) -> Options[Any]:
    """Return the model that has the table of a model; a proxy has none."""
    return (meta.concrete_model or meta.model)._meta


def business_of(name: str, entry: AuditSettings) -> Business:
    """
    Return what the jobs read for an entry.

    Raises:
        ConfigurationError: the first of its problems.
    """
    for text, hint in problems_with(entry):
        raise ConfigurationError(f"{place_of(name)} {text}", hint)
    model = apps.get_model(entry.model)
    meta = _concrete(model._meta)
    topic = cast("type[Message]", message_type(entry.expects))._meta.topic
    connection = connections[router.db_for_read(model)]
    quoted = connection.ops.quote_name
    table, key, at = quoted(meta.db_table), quoted(_key(meta)), ""
    kind = str(meta.pk.cast_db_type(connection))
    if entry.at:
        field = cast("DateTimeField[Any, Any]", meta.get_field(entry.at))
        at, owner = quoted(str(field.column)), _owner(meta, field)
        if owner is not None and owner is not meta:  # the column is in the table of a parent
            join = f"{quoted(owner.db_table)} parent ON parent.{quoted(_key(owner))} = child.{key}"
            table = f"(SELECT child.*, parent.{at} FROM {table} child JOIN {join})"  # noqa: S608
    return Business(
        name=name,
        topic=topic,
        type=entry.expects,
        about=meta.label_lower,
        table=table,
        key=key_text(f"b.{key}", kind),
        where=entry.where,
        at=at,
        also=sorted(model._meta.label_lower for model in apps.get_models() if meta in _parents(model._meta)),
    )


LOGIN = 'org.apache.kafka.common.security.{module} required username="{username}" password="{password}";'
LOGIN_MODULES = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
}
# librdkafka's names -> Java's. The first is the path of a PEM file, the second has what such a file contains.
PEM = {
    "ssl.truststore.certificates": ("ssl.ca.location", "ssl.ca.pem"),
    "ssl.keystore.certificate.chain": ("ssl.certificate.location", "ssl.certificate.pem"),
    "ssl.keystore.key": ("ssl.key.location", "ssl.key.pem"),
}
SAME = ("client.dns.lookup", "ssl.key.password", "ssl.cipher.suites")
VERIFY_HOST = "ssl.endpoint.identification.algorithm"
TRANSLATED = {
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    VERIFY_HOST,
    *SAME,
    *(name for names in PEM.values() for name in names),
}
OF_SECURITY = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")


def java_settings(client: Mapping[str, Any]) -> dict[str, str]:
    """
    Return the settings by which a client in Java connects as ours do; without those that only tune a client.

    Certificates and keys are in the settings themselves, so they need no file where the client runs.

    Raises:
        ConfigurationError: a setting of CLIENT that a connection may depend on has no counterpart, or a file cannot be read.
    """
    for name in client:
        if name.startswith(OF_SECURITY) and name not in TRANSLATED:
            raise ConfigurationError(f'OPTIONS["CLIENT"] sets {name!r}, which is not translated for clients in Java.')
    options = {"bootstrap.servers": str(client["bootstrap.servers"])}
    if "security.protocol" in client:
        options["security.protocol"] = str(client["security.protocol"]).upper()
    if VERIFY_HOST in client:
        options[VERIFY_HOST] = str(client[VERIFY_HOST]).replace("none", "")
    options |= {name: str(client[name]) for name in SAME if name in client}
    return options | _login(client) | _certificates(client)


def _login(client: Mapping[str, Any]) -> dict[str, str]:
    mechanism = str(client.get("sasl.mechanism", client.get("sasl.mechanisms", ""))).upper()
    if "sasl.username" not in client and not mechanism:
        return {}
    if mechanism not in LOGIN_MODULES:
        raise ConfigurationError(
            f'OPTIONS["CLIENT"] has the SASL mechanism {mechanism or "GSSAPI"}; only {", ".join(LOGIN_MODULES)} are translated '
            "for clients in Java."
        )
    names = {name: _quoted(str(client.get(f"sasl.{name}", ""))) for name in ("username", "password")}
    return {"sasl.mechanism": mechanism, "sasl.jaas.config": LOGIN.format(module=LOGIN_MODULES[mechanism], **names)}


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _certificates(client: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, (location, pem) in PEM.items():
        if pem in client:
            found[name] = str(client[pem])
        elif location in client:
            try:
                found[name] = Path(str(client[location])).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f'OPTIONS["CLIENT"]["{location}"] cannot be read as a PEM file: {error}') from error
    if "ssl.truststore.certificates" in found:
        found["ssl.truststore.type"] = "PEM"
    if "ssl.keystore.key" in found:
        found["ssl.keystore.type"] = "PEM"
    return found


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
    readable = readable_brokers()
    databases = {alias: database_source(alias, reader) for alias in {using, *readable.values()}}
    if archived:
        more["archived"] = _archived(using)
    else:
        more.setdefault("since", _complete_since(using))
    seen = [topic for broker in readable for topic in _topics_of(broker)]
    recorded = _recorded(using, but=seen)
    clusters = [_kafka_cluster(alias, client, using, but=recorded) for alias, client in kafka_brokers().items()]
    seen += [topic for cluster in clusters for topic in cluster.topics]
    return PipelineConfig(
        outbox=databases[using],
        brokers=[databases[alias] for alias in sorted({*readable.values()})],
        kafka=[cluster for cluster in clusters if cluster.topics],
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
    """Return what the jobs read for an entry. The query is planned now, so that wrong SQL is an error before Spark starts."""
    business = business_of(name, entry)
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(f"SELECT * FROM ({of_business(business).query}) b LIMIT 0")  # noqa: S608  (settings are trusted)
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
    waiting = {name: backlog for name, backlog in waiting.items() if backlog}
    try:
        java = java_settings(client) if topics else {}
    except ConfigurationError as error:
        hint = f"Let the recorder read its topics instead: manage.py outbox_record --broker {alias}"
        raise ConfigurationError(f"Spark cannot read broker {alias!r}: {error.message}", hint=hint) from error
    return KafkaCluster(alias, client, java, topics, waiting)


def _recorded(using: str, *, but: Sequence[str]) -> dict[str, float]:
    """Return the recorded topics -> the maximum delay of their messages at the broker, in seconds."""
    names = RecordedTopic.objects.using(using).exclude(topic__in=but).order_by("topic").values_list("topic", flat=True)
    topics = {name: conf.topic_settings(name) for name in names if name in conf.settings().topics}
    return {
        name: conf.broker_class(topic.broker).max_delay.total_seconds() if topic.type is TopicType.DELAY else 0.0
        for name, topic in topics.items()
    }


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

    def starts_at_latest(topic: str) -> bool:
        return conf.settings().brokers[conf.topic_settings(topic).broker].options.get("START") == "latest"

    return [
        AuditedGroup(group.name, sorted(group.topics), is_from_start=not any(map(starts_at_latest, group.topics)))
        for group in groups().values()
        if group.using == using
    ]


def _complete_since(using: str) -> datetime | None:
    """Return from when on the history is complete. None: it has never been pruned."""
    all_settings = conf.settings()
    now, installed_at = datetime.now(UTC), _installed_at(using)
    with connections[using].cursor() as cursor:
        cursor.execute(FIND_OLDEST_DAY)
        [day] = cursor.fetchone()
    oldest = datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC) if day else None
    kept = min([all_settings.retention, *(topic.retention for topic in all_settings.topics.values())])
    if installed_at and oldest and oldest.date() > installed_at.date():  # days were dropped, maybe by a shorter retention
        kept = min(kept, now - oldest)
    since = now - kept + min(kept / 4, timedelta(days=1))
    return None if installed_at is None or installed_at > since else since


def _installed_at(using: str) -> datetime | None:
    with connections[using].cursor() as cursor:
        cursor.execute(INSTALLED_AT)
        [installed_at] = cursor.fetchone()
    return None if installed_at is None else database.aware(installed_at)


def _archived(using: str) -> Archived:
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive to audit: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.')
    born, kept = _installed_at(using) or datetime.now(UTC), conf.settings().retention
    return Archived(str(Path(archive.path, using)), born, kept.total_seconds(), _complete_since(using))
