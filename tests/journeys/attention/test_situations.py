"""
What an operator reads in each situation of the table, which docs/how-to/watch.md contains: real processes and servers are killed,
frozen, filled and taken away, several situations at once, each with a database of its own.

`make test-journeys` plays some of them, each for a few seconds. By hand, all of them, each sampled every second for a minute::

    ATTENTION_SECONDS=60 python -m pytest -s tests/journeys/attention

The full disk needs root, and the clocks need libfaketime. ATTENTION_ONLY has parts of the names of those to play, separated by
a bar. What was seen is printed as rows of a table, as it comes, and written as a Markdown file where ATTENTION_TABLE names one.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.journeys.attention.situations import NOTHING, SITUATIONS, Situation
from tests.journeys.attention.stage import Sample, Servers, Stage

SECONDS = float(os.environ.get("ATTENTION_SECONDS", "0"))
ONLY = os.environ.get("ATTENTION_ONLY", "")
TABLE = os.environ.get("ATTENTION_TABLE", "")
AT_ONCE = int(os.environ.get("ATTENTION_AT_ONCE", "8"))
IN_SUITE_SECONDS = 5.0
GONE_WITHIN = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.rabbitmq,
    pytest.mark.timeout(3600 if SECONDS else 240),
    pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server: apt-get install redis-server."),
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]

PLAYED = [one for one in SITUATIONS if (SECONDS or one.in_suite) and any(part in one.name for part in ONLY.split("|"))]


@dataclass
class Outcome:
    """
    What became of one situation.

    Args:
        named: seconds from the end of the harm until its entry was first seen; None if it never was.
        samples: how many there were from then on until it was mended.
        without: how many of these were without the entry.
        gone: seconds from the mend until it was gone; None if it stayed.
        others: entries seen beside it -> in how many samples.
        text: the last entry.
        left: what still needed attention in the end.
        logs: of the processes.
    """

    named: float | None = None
    samples: int = 0
    without: int = 0
    gone: float | None = None
    others: Counter[str] = field(default_factory=Counter)
    text: str = ""
    left: list[str] = field(default_factory=list)
    logs: str = ""
    error: str = ""


def play(situation: Situation, servers: Servers, seconds: float) -> Outcome:
    """Play a situation, and look each second."""
    outcome = Outcome()
    try:
        with Stage(servers, situation.needs, situation.given, situation.starts, situation.web) as stage:
            try:
                _play(situation, stage, seconds, outcome)
            finally:
                outcome.logs = stage.logs()
    except Exception as error:  # reported with all others
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def _play(situation: Situation, stage: Stage, seconds: float, outcome: Outcome) -> None:
    stage.wait_for(lambda one: one.handled and (one.entries == {} or situation.entry == NOTHING), 90)
    acts = situation.play(stage)
    began = time.monotonic()
    next(acts)
    harmed = time.monotonic()
    deadline = harmed + situation.within * 1.5 + 10
    while situation.entry != NOTHING and time.monotonic() < deadline and not any(_since(stage, began, situation.entry)):
        time.sleep(0.2)
    first = next(_since(stage, began, situation.entry), None)
    if first is not None:
        outcome.named = max(0.0, first.at - harmed)
    elif situation.entry != NOTHING:
        seconds = min(seconds, 5)
    _wait(seconds)
    seen = [one for one in stage.samples if one.at >= (first.at if first else began)]
    outcome.samples = len(seen)
    outcome.without = sum(not one.has(situation.entry) for one in seen)
    names = (name for one in stage.samples if one.at >= began for name in one.names)
    outcome.others = Counter(name for name in names if not f"{name} ".startswith(f"{situation.entry} "))
    texts = [told for one in seen if (told := one.told(situation.entry))]
    outcome.text = " | ".join(texts[-1]) if texts else ""
    mended = time.monotonic()
    next(acts, None)
    try:
        outcome.gone = stage.wait_for(lambda one: not one.has(situation.entry), GONE_WITHIN).at - mended
        stage.wait_for(lambda one: one.entries == {}, 20)
    except AssertionError:
        outcome.left = stage.samples[-1].names


def _since(stage: Stage, began: float, entry: str) -> Iterator[Sample]:
    return (one for one in stage.samples if one.at >= began and one.has(entry))


def _wait(seconds: float) -> None:
    time.sleep(seconds)  # the duration is what is tested


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All of them, played several at once."""
    with Servers() as servers, ThreadPoolExecutor(AT_ONCE) as pool:
        playing = {pool.submit(play, situation, servers, SECONDS or IN_SUITE_SECONDS): situation for situation in PLAYED}
        outcomes = {}
        for future in as_completed(playing):
            situation = playing[future]
            outcomes[situation.name] = future.result()
            if SECONDS:
                print(row(situation, future.result()), flush=True)  # noqa: T201
        if TABLE:
            rows = [row(situation, outcomes[situation.name]) for situation in PLAYED]
            Path(TABLE).write_text("\n".join([cells(*HEADS), "|" + "---|" * len(HEADS), *rows]) + "\n")
        return outcomes


HEADS = ("situation", "finding", "named after", "sentence and remedy", "done", "gone after", "without it", "beside it", "left")


def row(situation: Situation, seen: Outcome) -> str:
    """Return what was seen, as a row of a table."""
    named = seen.error or ("never" if seen.named is None else f"{seen.named:.0f} s")
    gone = "never" if seen.gone is None else f"{seen.gone:.0f} s"
    if situation.entry == NOTHING:
        named = gone = seen.error
    without = f"{seen.without} of {seen.samples}" if seen.without and situation.entry != NOTHING else ""
    others = ", ".join(f"{name} ({count})" for name, count in seen.others.most_common())
    return cells(
        *(situation.name, situation.entry or "none", named, seen.text, situation.do, gone, without, others, ", ".join(seen.left))
    )


def cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in texts) + " |"


class TestEachSituation:
    def test_is_named_in_time_and_stays_named_until_it_is_mended(self, outcomes):
        late = {one.name: outcomes[one.name] for one in PLAYED if not _is_right(one, outcomes[one.name])}

        assert {name: (seen.error, seen.named, seen.without, seen.gone, seen.others) for name, seen in late.items()} == {}


def _is_right(one: Situation, seen: Outcome) -> bool:
    if one.entry == NOTHING:
        return not seen.error and not +seen.others
    return seen.named is not None and seen.named <= one.within and not seen.without and seen.gone is not None
