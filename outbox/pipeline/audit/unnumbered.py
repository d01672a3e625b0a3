"""Messages without a number: half first, or still waiting. Joined by id; there are few."""

from __future__ import annotations

from datetime import timedelta
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.audit.keys import by_topic
from outbox.pipeline.audit.recorded import roles_of
from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.findings import NOT_SENT, Finding, Kind, Stage
from outbox.pipeline.history import History
from outbox.pipeline.transforms.roles import Seen

NOT_READ = "the recorder has not come so far"
SENT_AS = {
    int(Seen.SENT): "sent",
    int(Seen.SENT_YOUNG): "sent young",
    int(Seen.UNSEEN): "unseen",
    int(Seen.UNREAD): "unread",
}


def audit_unnumbered(config: PipelineConfig, history: History) -> list[Finding]:
    """Hold the stages to each other, message by message."""
    seen = reduce(DataFrame.unionAll, _stages(config, history)).groupBy("message_id", "topic")
    wrong = (
        seen.agg(F.collect_set("seen").alias("seen"))
        .select("message_id", "topic", F.explode(F.array_compact(F.array(*_rules(config)))).alias("wrong"))
        .select("topic", "wrong.kind", "wrong.stage", "wrong.detail", "wrong.group", "message_id")
    )
    rows = [(row.topic, Kind(row.kind), Stage(row.stage), row.detail, row.group, row.message_id) for row in wrong.collect()]
    return by_topic(config, rows)


def _stages(config: PipelineConfig, history: History) -> list[DataFrame]:
    """Give message_id, topic, seen: one row for each thing that can be said of a message."""
    cutoff = F.lit(history.as_of - timedelta(seconds=config.settle_seconds))
    is_old = F.coalesce(F.col("at") <= cutoff, F.lit(True))
    is_ours = F.col("number").isNull() & F.col("source").isin(*history.sources)
    state = F.col("state")
    sent = F.element_at(
        F.create_map(*(F.lit(value) for pair in SENT_AS.items() for value in pair)), roles_of(config, history).of_sent()
    )
    place = (
        F.when(state == "sent", sent)
        .when(state.isin("dead", "skipped"), "gone")
        .otherwise(F.when(is_old, "late").otherwise("open"))
    )
    ended = F.when(F.col("outcome") == "dead letter", "dead in ").otherwise("waits in ")
    found = [
        (history.places, place),
        (history.broker, F.when(is_old, "stored").otherwise("stored young")),
        (history.inbox, F.concat(F.lit("in "), "consumer_group")),
        (history.attempts.where(F.col("outcome") != "duplicate"), F.concat(ended, "consumer_group")),
    ]
    for group in config.groups:
        for topic, tags in group.topics.items():
            if tags is not None:
                others = history.broker.where((F.col("topic") == topic) & ~F.coalesce(F.col("tag").isin(tags), F.lit(False)))
                found.append((others, F.lit(f"not for {group.name}")))
    return [frame.where(is_ours).select("message_id", "topic", seen.alias("seen")) for frame, seen in found]


def _rules(config: PipelineConfig) -> list[Column]:
    """Give a struct for each rule that a message breaks, else NULL. Takes topic, seen."""

    def is_(*names: str) -> Column:
        return reduce(Column.__or__, [F.array_contains("seen", name) for name in names])

    placed = is_(*SENT_AS.values(), "gone", "late", "open")
    stored = is_("stored", "stored young")
    is_seen = F.col("topic").isin(*config.seen_topics) if config.seen_topics else F.lit(False)
    arrived = F.exists("seen", lambda one: one.startswith("in "))
    rules = [
        _rule(is_("late") & ~stored, Kind.LATE, Stage.OUTBOX, NOT_SENT),
        _rule(is_seen & is_("sent") & ~stored, Kind.LOST, Stage.BROKER),
        _rule(is_seen & is_("unread") & ~stored, Kind.LATE, Stage.BROKER, NOT_READ),
        _rule(stored & ~placed, Kind.ORPHAN, Stage.BROKER),
        _rule(arrived & ~stored & ~placed, Kind.ORPHAN, Stage.INBOX),
    ]
    due = F.when(is_seen, is_("stored", "unseen")).otherwise(is_("sent"))
    for group in config.groups:
        if group.topics:
            name = group.name
            owed = due & F.col("topic").isin(*group.topics) & ~is_(f"in {name}", f"dead in {name}", f"not for {name}")
            waits = is_(f"waits in {name}")
            rules.append(_rule(owed & ~waits, Kind.LOST, Stage.INBOX, group=name))
            rules.append(_rule(owed & waits, Kind.LATE, Stage.INBOX, group=name))
    return rules


def _rule(is_broken: Column, kind: Kind, stage: Stage, detail: str = "", group: str = "") -> Column:
    parts = {"kind": kind.value, "stage": stage.value, "detail": detail, "group": group}
    return F.when(is_broken, F.struct(*(F.lit(value).alias(name) for name, value in parts.items())))
