"""The report as a page."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docs.blocks.markdown import table

HEAD = """# Report

After this page you know what was done to the outbox on each broker, and what was lost, made up or doubled by it.
Every count is made without the framework's own counters: from tables that the publishers' transactions and the handlers wrote,
and by the brokers' own clients. `make report` repeats all runs, which takes about four hours; `docs/report.json` has
what this page is written from."""

PROMISES = """## What was promised

The sum of all runs on each broker: what broke one of [the guarantees](guarantees.md), of how many messages, under how many
faults. On RabbitMQ, on RocketMQ and for Celery's tasks copies break no promise; the inbox drops them."""

RUNS = """## Runs

Each run ends when faults have stopped and nothing is left to do; *settled* says after how many seconds. A dash: not counted."""

FAULTS = """## Faults

How often each fault was done in the runs that count what breaks the promise. `docs/report.json` has them by run."""

OTHERS = """## Schedules, requests, mutants"""

EXPLORER = """[The explorer](../tests/README.md) ran {schedules:,} seeded schedules with {steps:,} steps in {seconds:,.0f} s,
{rate} a second, on models of {brokers} kinds of broker; {failed} failed."""

REQUESTS = """The check-back endpoint got {requests:,} requests, most of them of random or spoiled bytes:
{statuses}. {wrong} were answered wrong."""

MUTANTS = """`make mutants` took {count} rules out, one at a time. A test has failed for each of {killed};
`docs/report.json` names it."""
SURVIVORS = """No test failed without: {rules}."""

# A promise, and the count that breaks it.
GUARANTEES = {
    "no message for a transaction that was rolled back": "ghosts",
    "every committed message is published, and handled": "lost",
    "published at most once": "copies",
    "effects of a handler happen once": "applied_twice",
    "order per key": "out_of_order",
}
BROKERS = {
    "embedded": "embedded broker",
    "kafka": "Kafka",
    "rabbitmq": "RabbitMQ",
    "rocketmq": "RocketMQ",
    "celery on RabbitMQ": "Celery's tasks on RabbitMQ",
    "celery on Redis": "Celery's tasks on Redis",
}
COLUMNS = ("messages", "lost", "ghosts", "copies", "applied_twice", "out_of_order")


@dataclass(frozen=True, slots=True)
class Sum:
    """What was counted on a broker, in all runs that count it."""

    broken: int
    messages: int
    faults: int


def page(records: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """Return the page of the runs' records, by their names."""
    outcomes = [outcome for record in records.values() for outcome in record["outcomes"]]
    parts = [HEAD, _versions(records, versions), PROMISES, _promises(outcomes), RUNS, _runs(records), FAULTS, _faults(outcomes)]
    paragraphs = {"explorer": _explorer, "foreign requests": _requests, "mutants": _mutants}
    found = {name: record["found"] for name, record in records.items()}
    parts += [OTHERS, *(write(found[name]) for name, write in paragraphs.items() if found.get(name))]
    return "\n\n".join(parts) + "\n"


def _versions(records: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    days = sorted({record["at"] for record in records.values()})
    between = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    commits = ", ".join(dict.fromkeys(f"`{record['commit']}`" for record in records.values()))
    with_ = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"Runs of {between}, at commit {commits}, on two cores, with {with_}."


def _promises(outcomes: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [promise, *(_cell(_sum([one for one in outcomes if one["broker"] == broker], count)) for broker in BROKERS)]
        for promise, count in GUARANTEES.items()
    ]
    return table(["broken, of messages, under faults", *BROKERS.values()], rows)


def _sum(outcomes: Iterable[Mapping[str, Any]], count: str) -> Sum | None:
    counted = [one for one in outcomes if one[count] is not None]
    if not counted:
        return None
    return Sum(
        sum(one[count] for one in counted),
        sum(one["messages"] for one in counted),
        sum(sum(one["faults"].values()) for one in counted),
    )


def _cell(found: Sum | None) -> str:
    return "-" if found is None else f"{found.broken:,} of {found.messages:,}, {found.faults:,} faults"


def _runs(records: Mapping[str, Mapping[str, Any]]) -> str:
    return table(
        ["run", "broker", "seconds", "faults", *(name.replace("_", " ") for name in COLUMNS), "settled"], _run_rows(records)
    )


def _run_rows(records: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for name, record in records.items():
        for one in record["outcomes"]:
            counts = [_number(one[column]) for column in COLUMNS]
            faults = _number(sum(one["faults"].values()))
            yield [name, BROKERS[one["broker"]], _number(one["seconds"]), faults, *counts, _number(one["settled_seconds"])]
        if record["exit_code"]:
            yield [f"**{name} has failed**, exit code {record['exit_code']}", *["-"] * (4 + len(COLUMNS))]


def _faults(outcomes: Iterable[Mapping[str, Any]]) -> str:
    by_kind: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for kind, times in outcome["faults"].items():
            counted = [promise for promise, count in GUARANTEES.items() if outcome[count] is not None]
            by_kind.setdefault(kind, Counter()).update(dict.fromkeys(counted, times))
    rows = [
        [kind, *(_number(times[promise] or None) for promise in GUARANTEES)]
        for kind, times in sorted(by_kind.items())
        if times.total()
    ]
    return table(["fault", *GUARANTEES], rows)


def _explorer(found: Mapping[str, Any]) -> str:
    return EXPLORER.format(
        schedules=found["schedules"],
        steps=found["steps"],
        seconds=found["seconds"],
        rate=found["schedules_per_second"],
        brokers=len({name.partition(",")[0] for name in found["by_broker_and_kind"]}),
        failed=len(found["failed_seeds"]),
    )


def _requests(found: Mapping[str, Any]) -> str:
    statuses = ", ".join(f"{count:,} times status {status}" for status, count in sorted(found["statuses"].items()))
    return REQUESTS.format(requests=found["requests"], statuses=statuses, wrong=found["wrong"])


def _mutants(found: Sequence[Mapping[str, Any]]) -> str:
    survivors = [mutant["rule"] for mutant in found if not mutant["killed_by"]]
    text = MUTANTS.format(count=len(found), killed=len(found) - len(survivors))
    return " ".join([text, *([SURVIVORS.format(rules="; ".join(survivors))] if survivors else [])])


def _number(count: float | None) -> str:
    return "-" if count is None else f"{count:,.0f}"
