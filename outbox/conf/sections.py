"""Every name of `OUTBOX`, with its type, default and unit."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import msgspec

from outbox.message import TopicType

Count = Annotated[int, msgspec.Meta(ge=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=str.upper):
    """A dict of settings: names in capitals, unknown ones refused."""


# The default of `backend` below is the one place of the core that names a broker: a project begins without a server.


class BrokerSettings(Section, frozen=True):
    """One entry of BROKERS."""

    backend: str = "outbox.embedded.EmbeddedBroker"  # dotted path of a Broker class
    options: dict[str, Any] = {}  # the broker's own, checked by it


class TopicSettings(Section, frozen=True):
    """One entry of TOPICS."""

    broker: str = "default"  # which one carries it
    type: TopicType | None = None  # by default transaction where the broker has half messages, else normal
    queues: Count = 4  # so many messages without a key may travel side by side
    retention: timedelta = timedelta(days=7)  # how long the broker keeps them


class RelaySettings(Section, frozen=True):
    """How the relay works. Safety never depends on a time given here."""

    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 500  # messages of a topic in one claim; of all, twice as many
    lease: timedelta = timedelta(seconds=30)  # other relays leave a claimed batch alone that long
    lanes: Count = 16  # at most so many relays at once in a database
    sweep_age: timedelta = timedelta(seconds=10)  # a decided batch that old is ended again
    retry_base: timedelta = timedelta(seconds=1)  # back-off of an unsure message: base x 2^tries, jittered
    retry_limit: timedelta = timedelta(minutes=5)  # no such wait is longer
    misconfigured_retry: timedelta = timedelta(seconds=30)  # wait of what only a person can set right
    breaker_threshold: Count = 3  # batches in a row that found the broker unavailable
    breaker_base: timedelta = timedelta(seconds=1)  # how long the breaker stays open: base x 2^probes, jittered
    breaker_limit: timedelta = timedelta(seconds=3)  # and no longer: sending goes on soon after the broker is back
    idle_wait_min: timedelta = timedelta(milliseconds=20)  # an idle relay looks again after this, then less and less often
    idle_wait_max: timedelta = timedelta(seconds=1)  # but at least this often, though nobody wakes it
    task_time: timedelta = timedelta(seconds=30)  # a Celery task drains no longer than this
    slice_bytes: Count = 8 * 1024 * 1024  # bodies loaded at once
    partition_days: Count = 7  # days of the message table made ahead


class ConsumerSettings(Section, frozen=True):
    """How consumers receive. A handler slower than INVISIBLE may see its message delivered to another process too."""

    batch_size: Count = 32  # messages received at once, at most
    invisible: timedelta = timedelta(seconds=60)  # how long other consumers do not see what one has received
    wait: timedelta = timedelta(seconds=1)  # how long one receive waits for messages
    settle: timedelta = timedelta(minutes=1)  # a number missing longer than this is a gap
    task_time: timedelta = timedelta(seconds=30)  # a Celery task consumes no longer than this


class CheckBackSettings(Section, frozen=True):
    """The check-back endpoint."""

    url: str = ""  # where relays ask about half messages; "": they ask the database themselves
    secrets: list[str] = []  # of 32 bytes or more, in base64 behind `whsec_`; the first signs, all verify
    tolerance: timedelta = timedelta(minutes=5)  # a signature's time may differ from ours by this, 5 minutes at most
    lock_timeout: timedelta = timedelta(seconds=2)  # an answer waits no longer for a lock; UNKNOWN then
    statement_timeout: timedelta = timedelta(seconds=5)  # nor for one statement, or for the connection
    throttle: str = "600/s"  # rate of answers, as in DRF, with any whole number of seconds


class Settings(Section, frozen=True):
    """The whole dict."""

    brokers: dict[str, BrokerSettings] = msgspec.field(default_factory=lambda: {"default": BrokerSettings()})  # by alias
    topics: dict[str, TopicSettings] = {}  # by name; a message goes to no other
    relay: RelaySettings = RelaySettings()  # below
    consumer: ConsumerSettings = ConsumerSettings()  # below
    check_back: CheckBackSettings = CheckBackSettings()  # below
    direct_databases: dict[str, str] = {}  # alias -> the alias that leads around its pooler, for what needs a session
    pipeline: dict[str, Any] = {}  # read by the app `outbox.pipeline`
    nudge: bool = True  # False: nobody is woken; relays find everything by their sweep
    celery_queue: str = "outbox"  # where nudges go; workers of the outbox listen there
    retention: timedelta = timedelta(days=7)  # sent messages, inbox rows and records stay at least that long
    dedupe_retention: timedelta = timedelta(days=7)  # a dedupe key is remembered that long
