"""Every setting in `OUTBOX`, with its type, default and unit."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import msgspec

from outbox.message import TopicType
from outbox.sections import Section

SmallCount = Annotated[int, msgspec.Meta(ge=1, le=32_767)]  # the range of smallint columns and of some protocols
QueueName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


# The default of `backend` is a broker that needs no server, so a new project needs no settings for it.


class BrokerSettings(Section, frozen=True):
    """One entry of BROKERS."""

    backend: str = "outbox.embedded.EmbeddedBroker"  # dotted path of a Broker class
    options: dict[str, Any] = {}  # options of the broker class, which validates them


class TopicSettings(Section, frozen=True):
    """One entry of TOPICS."""

    broker: str = "default"  # alias of the broker that carries the topic's messages
    type: TopicType | None = None  # default: transaction if the broker has half messages, otherwise normal
    queues: SmallCount = 4  # number of messages without a key that can be in flight to consumers at the same time
    retention: timedelta = timedelta(days=7)  # how long the broker keeps messages


class RelaySettings(Section, frozen=True):
    """How the relay works. No guarantee depends on a time given here."""

    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 500  # messages of a topic in a claim; 4 times as many under load
    lease: timedelta = timedelta(seconds=30)  # how long a claim lasts; a relay that dies loses its claims at once
    lanes: SmallCount = 16  # maximum number of simultaneous relays of a database
    sweep_age: timedelta = timedelta(seconds=10)  # a decided batch of this age is committed again, if that makes no second copy
    task_time: timedelta = timedelta(seconds=30)  # maximum duration of a Celery task that relays


class ConsumerSettings(Section, frozen=True):
    """How consumers receive."""

    batch_size: SmallCount = 32  # maximum number of messages received at once
    invisible: timedelta = timedelta(seconds=60)  # how long others do not see a received message; renewed while it is handled
    wait: timedelta = timedelta(seconds=1)  # how long one receive waits for messages
    max_deferred: Annotated[int, msgspec.Meta(ge=1)] = 100_000  # with more deferred messages that wait, a topic is not received
    dead_for: timedelta | None = None  # how long a dead letter is kept; None: until an operator acts
    settle: timedelta = timedelta(minutes=1)  # a number that is missing for longer is a gap
    task_time: timedelta = timedelta(seconds=30)  # maximum duration of a Celery task that consumes


class CheckBackSettings(Section, frozen=True):
    """The check-back endpoint and its callers."""

    url: str = ""  # URL of the endpoint that relays send check-backs to; "": relays read the database themselves
    secrets: list[str] = []  # each 32 bytes or more, in base64 after the prefix `whsec_`; the first one signs, all verify
    lock_timeout: timedelta = timedelta(seconds=2)  # how long an answer waits for a lock; after that, the answer is UNKNOWN
    throttle: str = "600/s"  # rate of answers, as in REST framework; also for a number of seconds, such as "600/10s"


class Settings(Section, frozen=True):
    """The dict `OUTBOX`."""

    # Name of the project that the tables of the outbox belong to; "": the package of WSGI_APPLICATION or ASGI_APPLICATION.
    project: str = ""
    brokers: dict[str, BrokerSettings] = msgspec.field(default_factory=lambda: {"default": BrokerSettings()})  # by alias
    topics: dict[str, TopicSettings] = {}  # by name; messages can be published only to these topics
    relay: RelaySettings = RelaySettings()  # below
    consumer: ConsumerSettings = ConsumerSettings()  # below
    check_back: CheckBackSettings = CheckBackSettings()  # below
    direct_databases: dict[str, str] = {}  # alias behind a pooler -> alias that bypasses the pooler, for session locks and LISTEN
    pipeline: dict[str, Any] = {}  # read by the app `outbox.pipeline`
    celery_wakeup: bool = True  # whether each commit that publishes sends the Celery task `outbox.tasks.relay`
    celery_queue: QueueName = "outbox"  # Celery queue of the tasks that wake relays
    retention: timedelta = timedelta(days=7)  # minimum time for which sent messages, inbox rows and records are kept
    idempotency_retention: timedelta = timedelta(days=7)  # how long an idempotency key is remembered
