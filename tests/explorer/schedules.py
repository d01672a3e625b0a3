"""One schedule: what takes part, from its seed; how it is run, and what is wrong after it."""

from __future__ import annotations

import random as global_random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import psycopg
from django.conf import settings

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import NeedsCheckLoop
from outbox.brokers.memory.broker import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.embedded.half_state import HalfState
from outbox.half_first import producers
from tests.explorer import actors, clock, compare, statements
from tests.explorer.actors import Order
from tests.explorer.brokers import SteppedMemoryBroker
from tests.explorer.policies import EVENTS, KINDS, WEIGHTS, Replayed, Seeded
from tests.explorer.scheduler import Actor, Decision, Fault, Policy, Scheduler, Trace
from tests.explorer.settings import SHARED, outbox

MEMORY = "tests.explorer.brokers.SteppedMemoryBroker"
PUBLISHERS = ("publisher-1", "publisher-2")
KEYS = ("a", "b")
PASSES = (3, 12, 45, 45, 700, 700)  # seconds: a window, a sweep, a lease, the longest wait before a message is sent again
STEPS_EACH = 8  # of an actor, about
SETTLED_AFTER = 12  # rounds in which everybody gets time

ALL = frozenset({"plain", "keyed", "half"})


@dataclass(frozen=True, slots=True)
class Kind:
    """
    A broker, and what is promised with it.

    Args:
        once: the topics whose messages it must have exactly once; those of the others at least once.
        topics: those that orders go to.
    """

    outbox: Mapping[str, Any]
    once: frozenset[str]
    topics: tuple[str, ...] = ("plain", "keyed", "half")


def _memory(**options: Any) -> dict[str, Any]:
    return outbox(MEMORY, NAME=SHARED, CLOCK=clock.CLOCK.now, **options)


BROKERS: dict[str, Kind] = {
    "embedded": Kind(outbox("outbox.embedded.EmbeddedBroker"), ALL),
    "idempotent": Kind(_memory(END="idempotent"), frozenset({"half"})),
    "stateless": Kind(_memory(END="stateless", COMMIT_WINDOW=timedelta(seconds=2)), frozenset()),
    "transactions": Kind(_memory(TRANSACTIONS=True), ALL, ("plain", "keyed")),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Who takes part in a schedule.

    Args:
        about: what it tries; before one about consumers, the messages are sent.
        actors: the names of those that run side by side.
        orders: each publisher's; one that is not among the actors has placed them before.
        passes: the seconds that pass, each time.
        rounds: how often relays and consumers look for work.
        faults: the most steps to which something happens.
        discards: whether the broker gives half messages up.
    """

    broker: str
    kind: str
    about: str
    actors: tuple[str, ...]
    orders: tuple[tuple[str, tuple[Order, ...]], ...]
    passes: tuple[int, ...]
    rounds: int
    faults: int
    discards: bool = False


# Who takes part, at least, by what a schedule is about.
ABOUT: dict[str, tuple[str, ...]] = {
    "relays": ("relay-1", "relay-2", "time"),
    "check-backs": ("relay-1", "relay-2", "checker-1", "time"),
    "half first": ("publisher-1", "checker-1", "time"),
    "consumers": ("consumer-1", "consumer-2", "time"),
    "all": ("publisher-1", "relay-1", "consumer-1", "time"),
}
OTHERS = ("publisher-2", "relay-2", "sweeper", "checker-1", "checker-2", "consumer-1")


@dataclass(frozen=True, slots=True)
class Scope:
    """
    What seeds are about.

    Args:
        about: empty: everything.
        refuses: whether the broker may refuse messages, and give half messages up.
    """

    brokers: tuple[str, ...] = tuple(BROKERS)
    about: tuple[str, ...] = ()
    refuses: bool = True


EVERYTHING = Scope()


def plan(seed: int, scope: Scope = EVERYTHING) -> Plan:
    """Return who takes part in the schedule of a seed."""
    random = Random(seed)
    broker = random.choice(scope.brokers)
    kind = BROKERS[broker]
    has_halves = "half" in kind.topics
    about = random.choice([one for one in scope.about or ABOUT if has_halves or one not in ("check-backs", "half first")])
    others = [one for one in OTHERS if random.random() < 0.2]
    names = [*ABOUT[about], *others, *(one for one in EVENTS if random.random() < 0.7)]
    names = [one for one in dict.fromkeys(names) if has_halves or not one.startswith("checker")]
    numbers = iter(range(1, 100))
    is_about_halves = about in ("check-backs", "half first") or (about == "relays" and random.random() < 0.5)
    mostly = "half" if has_halves and is_about_halves else ""
    orders = tuple(
        (name, tuple(_order(random, next(numbers), kind, mostly, about, scope) for _ in range(random.randint(1, 2))))
        for name in PUBLISHERS
    )
    return Plan(
        broker,
        random.choices(KINDS, WEIGHTS)[0],
        about,
        tuple(names),
        orders,
        tuple(random.choice(PASSES) for _ in range(random.randint(1, 5))),
        random.randint(1, 3),
        random.choice((0, 1, 1, 2, 3)),
        scope.refuses and random.random() < 0.2,
    )


def _order(random: Random, number: int, kind: Kind, mostly: str, about: str, scope: Scope) -> Order:
    topic = mostly if mostly and random.random() < 0.8 else random.choice(kind.topics)
    return Order(
        number,
        topic,
        key=random.choice(KEYS) if topic == "keyed" else "",
        half_first=topic == "half" and random.random() < (0.8 if about == "half first" else 0.3),
        is_rolled_back=random.random() < 0.15,
        is_refused_once=scope.refuses and random.random() < 0.1,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a schedule: `problems` is empty where all is as promised."""

    plan: Plan
    trace: Trace
    problems: list[str]


def run_seed(seed: int, scope: Scope = EVERYTHING) -> Result:
    """Run the schedule of a seed."""
    chosen = plan(seed, scope)
    policy = Seeded(chosen.kind, Random(seed + 1), steps=STEPS_EACH * len(chosen.actors), faults=chosen.faults)
    return run(chosen, policy, seed=seed)


def replay(chosen: Plan, decisions: Sequence[Decision], *, seed: int) -> Result:
    """Run a schedule whose decisions are given."""
    return run(chosen, Replayed(decisions), seed=seed)


def run(chosen: Plan, policy: Policy, *, seed: int) -> Result:
    """Run a schedule on an empty database; give everybody time; compare."""
    _prepare(chosen, seed)
    broker = conf.make_broker(actors.BROKER)
    for order in (one for _, orders in chosen.orders for one in orders if one.is_refused_once):
        if isinstance(broker, SteppedMemoryBroker):
            broker.refuse_once(order.number)
    early = [one for name, orders in chosen.orders if name not in chosen.actors for one in orders]
    _alone(actors.publisher(early))
    if chosen.about == "consumers":
        _alone(actors.relay(2))
    trace = Scheduler(_actors(chosen, broker), policy).run()
    once = BROKERS[chosen.broker].once
    _give_time(broker, once)
    found = compare.read(statements.MONITOR[0].connection, _copies(broker))
    broker.close()
    return Result(chosen, trace, compare.problems(found, once=once))


def _prepare(chosen: Plan, seed: int) -> None:
    global_random.seed(seed)
    kind = BROKERS[chosen.broker]
    if settings.OUTBOX is not kind.outbox:
        settings.OUTBOX = kind.outbox
        conf.forget()
    producers.close_idle()
    forget(SHARED)
    connection = statements.MONITOR[0].connection
    connection.execute(clock.START, [clock.CLOCK.start()])
    _empty(connection)


KEPT = ("django_%", "auth_%", "outbox_source", "outbox_topic", "outbox_embedded_topic")
FILLED = f"""
SELECT string_agg(oid::regclass::text, ', ') FROM pg_class WHERE relkind = 'r' AND relnamespace = '{clock.SCHEMA}'::regnamespace
AND relname NOT LIKE ALL(%s) AND pg_relation_size(oid) > 0
"""


def _empty(connection: psycopg.Connection[Any]) -> None:
    (filled,) = connection.execute(FILLED, [list(KEPT)]).fetchone() or (None,)
    if filled:
        connection.execute(f"TRUNCATE {filled} RESTART IDENTITY")
    connection.execute("UPDATE outbox_topic SET paused = false, paused_at = NULL WHERE paused")
    connection.execute("ALTER SEQUENCE explorer_place RESTART")


def _actors(chosen: Plan, broker: Broker) -> list[Actor]:
    works: dict[str, Callable[[], actors.Work]] = {
        "relay-1": lambda: actors.relay(chosen.rounds),
        "relay-2": lambda: actors.relay(chosen.rounds),
        "sweeper": lambda: actors.sweeper(chosen.rounds),
        "consumer-1": lambda: actors.consumer(chosen.rounds),
        "consumer-2": lambda: actors.consumer(chosen.rounds),
        "checker-1": lambda: actors.check_loop(chosen.rounds),
        "checker-2": lambda: actors.check_loop(chosen.rounds),
        "time": lambda: actors.time(chosen.passes),
        "network": lambda: actors.network(2, broker, discards=chosen.discards),
        "operator": lambda: actors.operator(["pause plain", "replay", "resume", "replay"]),
    }
    for name, orders in chosen.orders:
        works[name] = lambda orders=orders: actors.publisher(orders)
    return [Actor(name, actors.process(works[name]()), on_kill=statements.close_all) for name in chosen.actors]


class Unstepped(Actor):
    """An actor that never stops, since nothing else runs."""

    def stop(self, label: str, faults: Sequence[Fault] = (), *, is_decisive: bool = False) -> Fault:
        return Fault.NONE


def _give_time(broker: Broker, once: frozenset[str]) -> None:
    """Let the requests arrive that are late, and each process work until nothing is left to do or to decide."""
    if isinstance(broker, MemoryBroker):
        broker.deliver_late()

    def work() -> None:
        for _ in range(SETTLED_AFTER):
            actors.let_pass(PASSES[-1])
            with actors.running_relay() as relay:
                relay.sweep()
                relay.drain()
                relay.sweep()
            if NeedsCheckLoop.has(broker):
                actors.check_loop(1)()
            actors.operator(["resume", "replay"])()
            actors.consumer(3)()
            found = compare.read(statements.MONITOR[0].connection, _copies(broker))
            if not compare.problems(found, once=once) and not _count_undecided(broker):
                break

    _alone(work)


def _alone(work: actors.Work) -> None:
    """Do some work in an actor that does not stop, since nothing else runs."""
    actor = Unstepped("alone", actors.process(work), on_kill=statements.close_all)
    actor.start()
    if actor.error is not None:
        raise actor.error


def _count_undecided(broker: Broker) -> int:
    """Return how many half messages the broker may still commit."""
    if isinstance(broker, MemoryBroker):
        return len(broker.undecided())
    undecided = f"SELECT count(*) FROM outbox_embedded_half WHERE state = {HalfState.UNDECIDED}"
    return int(statements.MONITOR[0].connection.execute(undecided).fetchall()[0][0])


def _copies(broker: Broker) -> list[bytes]:
    if isinstance(broker, MemoryBroker):
        return [bytes(one.body) for topic in broker.topics for one in broker.visible(topic)]
    rows = statements.MONITOR[0].connection.execute("SELECT body FROM outbox_embedded_message ORDER BY topic_id, queue, pos")
    return [bytes(row[0]) for row in rows.fetchall()]
