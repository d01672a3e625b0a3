"""
A database of each earlier release, with work in flight, is migrated, and processes of this release finish the work.

It is loaded as it is after a short stop, and as if everything had been stopped for longer than messages are kept.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from tests.journeys.processes import Processes
from tests.upgrades.consumers import GROUPS
from tests.upgrades.load import load
from tests.upgrades.shop import Shop, left_to_do
from tests.waiting import wait_until

DUMPS = sorted(Path(__file__).parent.glob("*.sql"))
SOON = timedelta(hours=2)  # after what waits for an hour
LATE = timedelta(days=40)  # after all retention
PATIENCE = 60.0  # seconds
LANES = {"orders", "notes", "steps", "alarms", "moods"}  # topics whose lanes give all their numbers to messages that are sent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CASES = "SELECT what, topic, ends FROM upgrade_case ORDER BY number"

SHOWN = """
SELECT convert_from(m.body, 'UTF8')::json ->> 'what', t.name, (m.headers::json ->> 'ce-lane')::int,
    (m.headers::json ->> 'ce-number')::int
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id ORDER BY m.topic_id, m.queue, m.pos
"""


class Upgraded:
    """A migrated dump, and the processes that go on."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.shop = Shop(url)
        self.folder = folder
        with psycopg.connect(url) as connection:
            self.cases = connection.execute(CASES).fetchall()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Run a relay with its check loop and maintenance, and a consumer."""
        with closing(Processes(self.folder, "tests.upgrades.settings")) as processes:
            processes.start("django", "outbox_relay", "--broker", "default", DATABASE_URL=self.url)
            processes.start("django", "outbox_consume", DATABASE_URL=self.url)
            try:
                yield
            except AssertionError:
                print(processes.logs())  # noqa: T201  (pytest shows it where the test failed)
                raise

    def settle(self) -> None:
        """Wait until nothing is left to do."""
        try:
            wait_until(lambda: not any(left_to_do(self.url)), PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"left to do: {left_to_do(self.url)}") from error

    def operate(self) -> tuple[list[str], list[str]]:
        """Have an operator replay and resume; return what the broker in memory shows before and after that."""
        before, after = json.loads(self.shop.run("tests.upgrades.acts", "operate"))
        return before, after

    def named(self, *ends: str) -> set[str]:
        """Return the messages that end in one of these ways."""
        return {what for what, _, how in self.cases if how in ends}

    def handled(self) -> Counter[tuple[str, str]]:
        """Return how often each group has handled each message."""
        with psycopg.connect(self.url) as connection:
            return Counter(connection.execute("SELECT consumer_group, what FROM upgrade_effect").fetchall())

    def due(self, *ends: str) -> Counter[tuple[str, str]]:
        """Return that each group handles each message once that ends in one of these ways."""
        messages = [(what, topic) for what, topic, how in self.cases if how in ends]
        return Counter((group, what) for what, topic in messages for group, topics in GROUPS.items() if topic in topics)

    def steps(self) -> list[str]:
        """Return what was handled of the key, in its order."""
        with psycopg.connect(self.url) as connection:
            rows = connection.execute("SELECT what FROM upgrade_effect WHERE what LIKE '%(steps)' ORDER BY number")
            return [what for (what,) in rows]

    def numbers(self) -> dict[tuple[str, int], list[int]]:
        """Return the numbers of the messages that the broker shows, by topic and lane."""
        found: dict[tuple[str, int], list[int]] = {}
        with psycopg.connect(self.url) as connection:
            for _, topic, lane, number in connection.execute(SHOWN):
                if lane is not None:
                    found.setdefault((topic, lane), []).append(number)
        return {place: sorted(numbers) for place, numbers in found.items()}

    def last_numbers(self) -> dict[tuple[str, int], int]:
        """Return the last number that each lane has given, by topic and lane."""
        last = "SELECT name, lane, last_seq FROM outbox_lane JOIN outbox_topic topic ON topic.id = topic_id"
        with psycopg.connect(self.url) as connection:
            return {(topic, lane): number for topic, lane, number in connection.execute(last)}

    def shown(self) -> Counter[str]:
        """Return how often the broker shows each message."""
        with psycopg.connect(self.url) as connection:
            return Counter(what for what, *_ in connection.execute(SHOWN))


@pytest.fixture(params=DUMPS, ids=[dump.stem for dump in DUMPS])
def dump(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def upgrade(dump: Path, fresh_database: str, tmp_path: Path):
    """Return a function that loads the dump as if it were of some age, and migrates it."""

    def upgrade(age: timedelta) -> Upgraded:
        load(dump, fresh_database, age=age)
        Shop(fresh_database).run("django", "migrate", "--verbosity", "0")
        return Upgraded(fresh_database, tmp_path)

    return upgrade


class TestADatabaseOfAnEarlierRelease:
    def test_is_finished_by_this_one(self, upgrade):
        shop = upgrade(SOON)

        with shop.at_work():
            shop.settle()

            assert shop.handled() == shop.due("handled")

            ledger, whole_ledger = shop.operate()
            shop.shop.publish("published with the key of an older one", "notes", idempotency_key="once")
            shop.shop.publish("published after the upgrade", *LANES)
            shop.settle()

        after = [(group, topic) for group, topics in GROUPS.items() for topic in topics if topic in LANES]
        later = Counter((group, f"published after the upgrade ({topic})") for group, topic in after)
        assert shop.handled() == shop.due("handled", "dead letter", "paused") + later
        assert set(shop.shown().values()) == {1}
        assert shop.named("rolled back").isdisjoint(shop.shown())
        assert set(ledger) == shop.named("sent")
        assert sorted(whole_ledger) == sorted(shop.named("sent", "dead", "sent after the dead one"))
        assert shop.steps() == [what for what, topic, _ in shop.cases if topic == "steps"] + [
            "published after the upgrade (steps)"
        ]
        last = {place: number for place, number in shop.last_numbers().items() if place[0] in {*LANES, "held"}}
        assert shop.numbers() == {place: list(range(1, number + 1)) for place, number in last.items()}

    def test_is_finished_after_all_that_is_kept_is_too_old(self, upgrade):
        shop = upgrade(LATE)

        with shop.at_work():
            shop.settle()
            ledger, whole_ledger = shop.operate()
            shop.settle()

        assert shop.handled() == shop.due("handled", "dead letter", "paused")
        assert shop.named("rolled back").isdisjoint(shop.shown())
        assert set(ledger) == shop.named("sent")
        assert sorted(whole_ledger) == sorted(shop.named("sent", "dead", "sent after the dead one"))
        assert all(len(numbers) == len(set(numbers)) for numbers in shop.numbers().values())
