"""
Make the configuration of Spark jobs from Django's settings.

    DATABASES, OUTBOX -> PipelineConfig(outbox, brokers, kafka, business, groups, …) -> JSON -> the job

    AUDIT = {"orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "WHERE": "b.total > 0", "AT": "placed_at"}}
    -> Business("orders", topic, "OrderPlaced", "shop.order", table='"shop_order"', key='b."id"::text', …)
"""

from __future__ import annotations

import re
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
from outbox.database.retention_holds import FROM_DAYS
from outbox.errors import ConfigurationError
from outbox.message import Message, TopicType, message_type
from outbox.pipeline.conf import SETTING, AuditSettings, settings
from outbox.pipeline.models import RecordedTopic
from outbox.pipeline.spark.config import Archived, AuditedGroup, Business, KafkaCluster, PipelineConfig, Reader, Source
from outbox.pipeline.spark.statements import of_business
from outbox.publishing.transactions import key_text


def setting_of(name: str) -> str:
    """Return the name of an entry of AUDIT, as errors show it."""
    return f'{SETTING}["AUDIT"]["{name}"]'


def problems_with(entry: AuditSettings) -> Iterator[tuple[str, str]]:
    """Yield each problem with an entry, and a hint."""
    if message_type(entry.expects) is None:
        text = f"has EXPECTS {entry.expects!r}, but no message type has this name."
        yield text, "Write the name of the type as it is sent, and make sure that its module is imported."
    try:
        meta = apps.get_model(entry.model)._meta
    except (LookupError, ValueError) as error:
        yield f"has MODEL {entry.model!r}: {error}", 'Write "app.Model".'
        return
    if not _key_column(meta):
        text = f"has MODEL {entry.model!r}, whose primary key has several columns."
        yield text, "Name a model with a key of one column: the audit finds a row's messages by its key."
    if entry.at and (problem := _problem_with_at(meta, entry.at)):
        yield problem


def _key_column(meta: Options[Any]) -> str:
    """Return the column of a model's primary key; "" if it has several."""
    return (meta.pk.column if meta.pk is not None else None) or ""


def _problem_with_at(meta: Options[Any], at: str) -> tuple[str, str] | None:
    times = sorted(
        field.name for field in meta.concrete_fields if isinstance(field, DateTimeField) and _model_with_column(meta, field)
    )
    hint = f"Its date-time fields are {', '.join(times)}." if times else "It has no date-time field: leave AT out."
    try:
        field = meta.get_field(at)
    except FieldDoesNotExist:
        return f"has AT {at!r}, but {meta.object_name} has no such field.", hint
    if not isinstance(field, DateTimeField):
        return f"has AT {at!r}, which is not a date-time field of {meta.object_name}.", hint
    if not _model_with_column(meta, field):
        return f"has AT {at!r}, a field of another parent than the one whose key {meta.object_name} has.", hint
    return None


def _model_with_column(meta: Options[Any], field: Field[Any, Any]) -> Options[Any] | None:
    """Return the model whose table has a field: this one, or a parent with the same key. None: a parent with another key."""
    owner = _concrete_model(field.model._meta)
    return owner if owner in (_concrete_model(meta), *_parents_with_same_key(meta)) else None


def _parents_with_same_key(meta: Options[Any]) -> Iterator[Options[Any]]:
    """Yield the parents (multi-table inheritance) whose rows have the same keys as the rows of a model."""
    current = _concrete_model(meta)
    while (parent := getattr(current.pk, "remote_field", None)) is not None and parent.parent_link:
        current = parent.model._meta
        yield current


def _concrete_model(meta: Options[Any]) -> Options[Any]:
    """Return the model whose table a model uses: a proxy has no table of its own."""
    return (meta.concrete_model or meta.model)._meta


def business_of(name: str, entry: AuditSettings) -> Business:
    """
    Return the configuration of an entry's business rows.

    Raises:
        ConfigurationError: the entry has a problem; the text says the first one.
    """
    for text, hint in problems_with(entry):
        raise ConfigurationError(f"{setting_of(name)} {text}", hint)
    model = apps.get_model(entry.model)
    meta = _concrete_model(model._meta)
    topic = cast("type[Message]", message_type(entry.expects))._meta.topic
    connection = connections[router.db_for_read(model)]
    quoted = connection.ops.quote_name
    table, key, at = quoted(meta.db_table), quoted(_key_column(meta)), ""
    kind = str(meta.pk.cast_db_type(connection))
    if entry.at:
        field = cast("DateTimeField[Any, Any]", meta.get_field(entry.at))
        at, owner = quoted(str(field.column)), _model_with_column(meta, field)
        if owner is not None and owner is not meta:  # the column is in a parent's table
            join = f"{quoted(owner.db_table)} parent ON parent.{quoted(_key_column(owner))} = child.{key}"
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
        also=sorted(model._meta.label_lower for model in apps.get_models() if meta in _parents_with_same_key(model._meta)),
    )


JAAS_CONFIG = 'org.apache.kafka.common.security.{module} required username="{username}" password="{password}";'
LOGIN_MODULES = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
}
# Java's name -> librdkafka's names: the first setting has the path of a PEM file, the second one the content of such a file.
PEM_SETTINGS = {
    "ssl.truststore.certificates": ("ssl.ca.location", "ssl.ca.pem"),
    "ssl.keystore.certificate.chain": ("ssl.certificate.location", "ssl.certificate.pem"),
    "ssl.keystore.key": ("ssl.key.location", "ssl.key.pem"),
}
SAME_IN_JAVA = ("client.dns.lookup", "ssl.key.password", "ssl.cipher.suites")  # settings with the same name and values
VERIFY_HOST = "ssl.endpoint.identification.algorithm"
TRANSLATED_SETTINGS = {
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    VERIFY_HOST,
    *SAME_IN_JAVA,
    *(name for names in PEM_SETTINGS.values() for name in names),
}
SECURITY_PREFIXES = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")


def java_settings(client: Mapping[str, Any]) -> dict[str, str]:
    """
    Return the settings with which a Java client connects as the Python client does. Settings that only tune a client are omitted.

    Certificates and keys are in the settings themselves, so the machine of the Java client needs no file.

    Raises:
        ConfigurationError: CLIENT has a setting on which a connection may depend, and which has no counterpart in Java; or a file
            cannot be read.
    """
    for name in client:
        if name.startswith(SECURITY_PREFIXES) and name not in TRANSLATED_SETTINGS:
            raise ConfigurationError(f'OPTIONS["CLIENT"] sets {name!r}, which is not translated for clients in Java.')
    options = {"bootstrap.servers": str(client["bootstrap.servers"])}
    if "security.protocol" in client:
        options["security.protocol"] = str(client["security.protocol"]).upper()
    if VERIFY_HOST in client:
        options[VERIFY_HOST] = str(client[VERIFY_HOST]).replace("none", "")
    options |= {name: str(client[name]) for name in SAME_IN_JAVA if name in client}
    return options | _java_login(client) | _java_certificates(client)


def _java_login(client: Mapping[str, Any]) -> dict[str, str]:
    mechanism = str(client.get("sasl.mechanism", client.get("sasl.mechanisms", ""))).upper()
    if "sasl.username" not in client and not mechanism:
        return {}
    if mechanism not in LOGIN_MODULES:
        raise ConfigurationError(
            f'OPTIONS["CLIENT"] has the SASL mechanism {mechanism or "GSSAPI"}; only {", ".join(LOGIN_MODULES)} are translated '
            "for clients in Java."
        )
    names = {name: _jaas_quoted(str(client.get(f"sasl.{name}", ""))) for name in ("username", "password")}
    return {"sasl.mechanism": mechanism, "sasl.jaas.config": JAAS_CONFIG.format(module=LOGIN_MODULES[mechanism], **names)}


def _jaas_quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _java_certificates(client: Mapping[str, Any]) -> dict[str, str]:
    certificates = {}
    for name, (location, pem) in PEM_SETTINGS.items():
        if pem in client:
            certificates[name] = str(client[pem])
        elif location in client:
            try:
                certificates[name] = Path(str(client[location])).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f'OPTIONS["CLIENT"]["{location}"] cannot be read as a PEM file: {error}') from error
    if "ssl.truststore.certificates" in certificates:
        certificates["ssl.truststore.type"] = "PEM"
    if "ssl.keystore.key" in certificates:
        certificates["ssl.keystore.type"] = "PEM"
    return certificates


# When the outbox was installed in this database. No row can be older.
INSTALLED_AT = "SELECT min(applied) FROM django_migrations WHERE app = 'outbox'"

# The oldest day that has a partition of messages. All days before it were dropped.
FIND_OLDEST_DAY = f"SELECT min(right(c.relname, 8)) {FROM_DAYS}"


def pipeline_config(
    using: str = DEFAULT_DB_ALIAS, *, reader: Reader = "jdbc", settle: timedelta, archived: bool = False, **more: Any
) -> PipelineConfig:
    """
    Return the configuration for an audit of a database: its outbox, brokers, business rows and consumer groups.

    Args:
        reader: a server behind a Unix socket is read with `python` in any case, since `jdbc` does not support sockets.
        settle: messages younger than this count as in flight.
        archived: also audit archived days.
        more: other fields of `PipelineConfig`.

    Raises:
        ConfigurationError: an entry of `OUTBOX["PIPELINE"]["AUDIT"]` names something that does not exist, or the database rejects
            its SQL; or there is no archive.
    """
    readable = readable_brokers()
    databases = {alias: database_source(alias, reader) for alias in {using, *readable.values()}}
    if archived:
        more["archived"] = _archived(using)
    else:
        more.setdefault("since", _complete_since(using))
    seen_topics = [topic for broker in readable for topic in _topics_of(broker)]
    recorded = _recorded(using, without=seen_topics)
    clusters = [_kafka_cluster(alias, client, using, without=recorded) for alias, client in kafka_brokers().items()]
    seen_topics += [topic for cluster in clusters for topic in cluster.topics]
    return PipelineConfig(
        outbox=databases[using],
        brokers=[databases[alias] for alias in sorted({*readable.values()})],
        kafka=[cluster for cluster in clusters if cluster.topics],
        kafka_jars=settings().kafka_jars,
        business=[_business(using, name, entry) for name, entry in settings().audit.items()],
        groups=_groups(using),
        seen_topics=[*seen_topics, *recorded],
        recorded=recorded,
        ordered_topics=[name for name in sorted(conf.settings().topics) if conf.topic_settings(name).type is TopicType.FIFO],
        settle_seconds=settle.total_seconds(),
        **more,
    )


def _business(using: str, name: str, entry: AuditSettings) -> Business:
    """Return the configuration of an entry's rows. Executes its query without rows, to report wrong SQL before Spark starts."""
    business = business_of(name, entry)
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(f"SELECT * FROM ({of_business(business).query}) b LIMIT 0")  # noqa: S608  (settings are trusted)
    except DatabaseError as error:
        reason = str(error).strip().splitlines()[0]
        hint = "Correct MODEL, AT or WHERE; run migrate if a table is missing."
        raise ConfigurationError(f"{setting_of(name)} cannot be read from database {using!r}: {reason}.", hint=hint) from error
    return business


def readable_brokers() -> dict[str, str]:
    """Return the brokers that keep messages in database tables, which the jobs can read -> the alias of the database."""
    used = sorted({topic.broker for topic in conf.settings().topics.values()})
    return {alias: conf.database_of_broker(alias) for alias in used if issubclass(conf.broker_class(alias), StoredInDatabase)}


def kafka_brokers() -> dict[str, dict[str, Any]]:
    """Return the brokers whose topics Spark's source for Kafka can read -> the settings of a Python client."""
    used = sorted({topic.broker for topic in conf.settings().topics.values()})
    options_of = {alias: conf.settings().brokers[alias].options for alias in used}
    return {
        alias: {**options.get("CLIENT", {}), "bootstrap.servers": ",".join(options["SERVERS"])}
        for alias, options in options_of.items()
        if issubclass(conf.broker_class(alias), SpeaksKafka)
    }


def _kafka_cluster(alias: str, client: dict[str, Any], using: str, *, without: Collection[str]) -> KafkaCluster:
    """
    Return the configuration of a cluster.

    Args:
        using: the database whose consumer groups are audited.
        without: leave out these topics, since the recorder records them.
    """
    topics = [topic for topic in _topics_of(alias) if topic not in without]
    waiting = {
        group.name: sorted(topic for topic in group.topics if topic in topics)
        for group in groups().values()
        if group.using == using
    }
    waiting = {name: of_group for name, of_group in waiting.items() if of_group}
    try:
        java = java_settings(client) if topics else {}
    except ConfigurationError as error:
        hint = f"Let the recorder read its topics instead: manage.py outbox_record --broker {alias}"
        raise ConfigurationError(f"Spark cannot read broker {alias!r}: {error.message}", hint=hint) from error
    return KafkaCluster(alias, client, java, topics, waiting)


def _recorded(using: str, *, without: Sequence[str]) -> dict[str, float]:
    """Return the topics that the recorder has recorded -> the maximum delay of their messages at the broker, in seconds."""
    names = RecordedTopic.objects.using(using).exclude(topic__in=without).order_by("topic").values_list("topic", flat=True)
    topics = {name: conf.topic_settings(name) for name in names if name in conf.settings().topics}
    return {
        name: conf.broker_class(topic.broker).max_delay.total_seconds() if topic.type is TopicType.DELAY else 0.0
        for name, topic in topics.items()
    }


def _topics_of(broker: str) -> Sequence[str]:
    return [topic.name for topic in conf.topics_of(broker)]


TLS_PARAMETERS = ("sslmode", "sslrootcert", "sslcert", "sslkey")
SCHEMAS_AND_ROLE = "SELECT current_setting('search_path'), current_setting('role')"


def database_source(alias: str, reader: Reader = "jdbc") -> Source:
    """
    Return the URL with which jobs connect to a database of Django, to the same schema and as the same role as Django.

    If that is a Unix socket, the reader is `python`.
    """
    with database.connect_session(alias, application_name="outbox audit") as connection:
        info = connection.info
        # `info.get_parameters()` would do the same, but fails without a home directory.
        given_options = [option for option in connection.pgconn.info if option.val not in (None, option.compiled)]
        parameters = {option.keyword.decode(): option.val.decode() for option in given_options if option.val}
        login = quote(info.user, safe="")
        if info.password:
            login += f":{quote(info.password, safe='')}"
        name = quote(info.dbname, safe="")
        query: dict[str, str | int] = {key: parameters[key] for key in TLS_PARAMETERS if key in parameters}
        [(schemas, role)] = connection.execute(SCHEMAS_AND_ROLE).fetchall()
        # Other options, such as a statement_timeout, are meant for shorter statements.
        session = {"search_path": schemas} if "options" in parameters else {}
        session |= {"role": role} if role != "none" else {}
        if session:
            query["options"] = " ".join(f"-c{name}=" + re.sub(r"[\s\\]", r"\\\g<0>", value) for name, value in session.items())
        if info.host.startswith("/"):
            query |= {"host": info.host, "port": info.port}
            return Source(f"postgresql://{login}@/{name}?{urlencode(query, quote_via=quote)}", reader="python")
        more = f"?{urlencode(query, quote_via=quote)}" if query else ""
        return Source(f"postgresql://{login}@{info.host}:{info.port}/{name}{more}", reader=reader)


def _groups(using: str) -> list[AuditedGroup]:
    """Return the consumer groups whose inbox is in this database."""

    def starts_at_latest(topic: str) -> bool:
        return conf.settings().brokers[conf.topic_settings(topic).broker].options.get("START") == "latest"

    return [
        AuditedGroup(group.name, sorted(group.topics), is_from_start=not any(map(starts_at_latest, group.topics)))
        for group in groups().values()
        if group.using == using
    ]


def _complete_since(using: str) -> datetime | None:
    """Return the time since which the database has all rows. None: nothing can have been pruned yet."""
    all_settings = conf.settings()
    now, installed_at = datetime.now(UTC), _installed_at(using)
    with connections[using].cursor() as cursor:
        cursor.execute(FIND_OLDEST_DAY)
        [day] = cursor.fetchone()
    oldest = datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC) if day else None
    kept_for = min([all_settings.retention, *(topic.retention for topic in all_settings.topics.values())])
    if (
        installed_at and oldest and oldest.date() > installed_at.date()
    ):  # days were dropped, possibly when the retention was shorter
        kept_for = min(kept_for, now - oldest)
    since = now - kept_for + min(kept_for / 4, timedelta(days=1))
    return None if installed_at is None or installed_at > since else since


def _installed_at(using: str) -> datetime | None:
    with connections[using].cursor() as cursor:
        cursor.execute(INSTALLED_AT)
        [installed_at] = cursor.fetchone()
    return None if installed_at is None else database.aware(installed_at)


def _archived(using: str) -> Archived:
    """Return the lake of a database. Raises ConfigurationError if there is no archive."""
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive to audit: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.')
    born, kept = _installed_at(using) or datetime.now(UTC), conf.settings().retention
    return Archived(str(Path(archive.path, using)), born, kept.total_seconds(), _complete_since(using))
