import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections
from django.test import Client
from django.urls import reverse

from outbox import conf, database
from outbox.api.health import cached_health, cached_readiness
from outbox.database import heartbeats
from outbox.models import State
from outbox.monitoring.health import Health
from tests.factories import BatchFactory, TopicFactory

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

READY, WELL = reverse("outbox:health"), reverse("outbox:health-outbox")


@pytest.fixture(autouse=True)
def _relays(db):
    for alias, broker in itertools.product(["default", "other"], {topic.broker for topic in conf.settings().topics.values()}):
        heartbeats.beat(database.raw(alias), "relay", broker=broker)


@pytest.fixture
def get():
    return lambda address: Client().get(address)


@pytest.fixture
def connect_with(monkeypatch):
    """Open connections to one database with other parameters."""

    def connect_with(alias, **parameters):
        known = connections[alias].get_connection_params()
        monkeypatch.setattr(connections[alias], "get_connection_params", lambda: {**known, **parameters})

    yield connect_with
    connections.close_all()  # which may have been opened with them


@pytest.mark.parametrize("address", [READY, WELL])
class TestBothAddresses:
    def test_answer_200_and_a_word_for_each_database(self, address, get):
        answer = get(address)

        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "databases": {"default": "ok", "other": "ok"}}
        assert answer.headers["Cache-Control"] == "no-store"

    def test_answer_503_when_a_database_cannot_be_reached(self, address, get, connect_with):
        connect_with("other", host="127.0.0.1", port=1)

        answer = get(address)

        assert answer.status_code == 503
        assert answer.json() == {"status": "not ok", "databases": {"default": "ok", "other": "unreachable"}}

    def test_answer_503_when_a_database_has_no_tables(self, address, get, connect_with):
        connect_with("other", options="-c search_path=void")

        answer = get(address)

        assert (answer.status_code, answer.json()["databases"]) == (503, {"default": "ok", "other": "unfit"})

    def test_answer_503_when_a_database_is_read_only(self, address, get, connect_with):
        connect_with("other", options="-c default_transaction_read_only=on")

        answer = get(address)

        assert answer.status_code == 503
        assert answer.json()["databases"] == {"default": "ok", "other": "read only" if address == READY else "needs attention"}

    def test_answer_without_a_transaction_around_them(self, address, get, monkeypatch):
        monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
        monkeypatch.setattr(connections["default"], "ensure_connection", lambda: pytest.fail("asked for a transaction"))

        assert get(address).status_code == 200

    def test_take_no_post(self, address):
        assert Client().post(address).status_code == 405


class TestWhatNeedsAttention:
    @pytest.fixture(autouse=True)
    def _a_dead_message(self, db):
        BatchFactory(topic=TopicFactory(name="parcels"), state=State.DEAD)

    def test_makes_the_outbox_unwell(self, get):
        answer = get(WELL)

        assert answer.status_code == 503
        assert answer.json() == {"status": "not ok", "databases": {"default": Health.NEEDS_ATTENTION, "other": "ok"}}

    def test_takes_no_shop_off_the_network(self, get):
        assert get(READY).status_code == 200

    def test_is_not_told_to_everybody(self, get):
        assert b"parcels" not in get(WELL).content


class TestAnAnswerThatIsKept:
    @pytest.fixture
    def connections_made(self, monkeypatch):
        made = []
        connect = database.connect

        def count(alias, **options):
            made.append(alias)
            return connect(alias, **options)

        monkeypatch.setattr(database, "connect", count)
        return made

    @pytest.mark.parametrize("address", [READY, WELL])
    def test_costs_one_reading_however_many_ask(self, address, get, connections_made, monkeypatch):
        for cached in (cached_readiness, cached_health):
            monkeypatch.setattr(cached, "_seconds", 60)  # a slow machine takes seconds for so many
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(get, [address] * 100))

        assert {one.status_code for one in answers} == {200}
        assert sorted(connections_made) == ["default", "other"]

    def test_is_read_again_after_a_while(self, get, monkeypatch):
        monkeypatch.setattr(cached_health, "_seconds", 0)
        before = get(WELL)
        BatchFactory(topic=TopicFactory(name="parcels"), state=State.DEAD)

        assert (before.status_code, get(WELL).status_code) == (200, 503)
