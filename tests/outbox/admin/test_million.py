"""
No page looks at all rows, however many there are, and none asks the database more than 15 times.

Each statement of a page is explained. `make test` fills the tables with a hundred thousand rows, `make test-browser` with a
million; the planner is left as it is.
"""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.test import Client
from django.urls import reverse

from outbox import database
from outbox.models import Batch, DeadMessage, MessageRow, State, Topic
from outbox.monitoring.find import MAX_MESSAGES_READ
from project.shop.models import Order
from tests.factories import TopicFactory
from tests.outbox.admin.million import fill

pytestmark = pytest.mark.django_db

FEW = 100_000  # of fewer, to read them all may be the best plan for a page
MANY = 1_000_000
LARGE = 5_000  # a table with more rows is not to be read to its end
QUERIES = 22

# Read once on purpose: topics, which are few.
SMALL = {"outbox_topic", "outbox_embedded_topic"}


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.million)], ids=["few", "a million"])
def messages(request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any) -> Iterator[int]:
    """Fill the tables for all tests here, in a transaction that is rolled back."""
    with django_db_blocker.unblock(), transaction.atomic():
        fill(
            database.raw("default"), request.param, orders=Topic.objects.get(name="orders").id, rare=TopicFactory(name="rare").id
        )
        yield request.param
        transaction.set_rollback(True)


@pytest.fixture(scope="module")
def client(messages: int) -> Client:
    """Return a member of the staff who may do everything here, and is no superuser: permissions cost queries."""
    user = User.objects.create_user("operator", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(content_type__app_label__in=["outbox", "outbox_embedded", "outbox_pipeline", "shop"])
    )
    client = Client()
    client.force_login(user)
    ContentType.objects.get_for_model(DeadMessage)  # once per process
    return client


@pytest.fixture
def look(client: Client, asked: list[tuple[Any, Any]], messages: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a page; return it after each of its statements was explained."""
    monkeypatch.setattr("outbox.admin.lists.MAX_READ", looked_at(messages))  # of a small table, 10,000 rows are a large part

    def look(view: str, *args: Any, **parameters: Any) -> Any:
        url = reverse(f"admin:{view if view.startswith('shop_') else f'outbox_{view}'}", args=args)
        asked.clear()
        page = client.get(url, parameters)
        statements = list(asked)
        assert page.status_code == 200
        assert len(statements) <= QUERIES, "\n".join(str(one) for one, _ in statements)
        assert {place for statement in statements for place in read_to_the_end(*statement)} == set()
        return page

    return look


def looked_at(messages: int) -> int:
    return messages // 100


def read_to_the_end(statement: Any, parameters: Any) -> list[str]:
    """Name the large tables that a statement reads without an index, as the planner would run it now."""
    text = statement.decode() if isinstance(statement, bytes) else str(statement)
    if not text.lstrip(" (\n").startswith(("SELECT", "WITH")):
        return []
    with psycopg.ClientCursor(database.raw("default")) as cursor:
        cursor.execute(f"EXPLAIN (FORMAT JSON) {text}", parameters)
        (plans,) = cursor.fetchone()
    nodes = [plans[0]["Plan"]]
    found = []
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] not in SMALL and rows_of(node["Relation Name"]) > LARGE:
            found.append(f"{node['Relation Name']} in {text} {json.dumps(node)}")
    return found


def rows_of(table: str) -> int:
    row = database.raw("default").execute("SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [table]).fetchone()
    return row[0]


def a_message(**batch: Any) -> MessageRow:
    found = Batch.objects.filter(**batch).order_by("-id").first()
    return MessageRow.objects.get(id=found.message_ids[0])


class TestReadToTheEnd:
    def test_notices_a_statement_without_an_index(self, messages):
        assert read_to_the_end("SELECT count(*) FROM outbox_message WHERE headers = %s", ["x"])


class TestMessages:
    def test_are_listed(self, look, messages):
        page = look("messagerow_changelist")

        assert "The newest 1000 messages" in page.text
        assert len(page.context["cl"].result_list) == 100

    def test_are_listed_behind_the_newest_thousand(self, look, messages):
        older = look("messagerow_changelist", p=10).context["cl"].older_url

        page = look("messagerow_changelist", **dict([older.lstrip("?").split("=")]))

        assert len(page.context["cl"].result_list) == 100

    @pytest.mark.parametrize("state", ["waiting", "delayed", "claimed", "prepared", "sent", "retrying", "dead"])
    def test_are_found_by_their_state(self, state, look, messages):
        page = look("messagerow_changelist", state=state)

        rows = page.context["cl"].result_list
        assert rows
        assert {row.current.state for row in rows} == {state}

    @pytest.mark.parametrize("state", ["released", "discarded", "lost"])
    def test_are_looked_for_by_a_state_that_none_has(self, state, look, messages):
        assert look("messagerow_changelist", state=state).context["cl"].result_count == 0

    def test_of_a_topic_are_found_by_their_state(self, look, messages):
        rows = look("messagerow_changelist", state="sent", topic="orders").context["cl"].result_list

        assert {(row.current.state, row.current.topic) for row in rows} == {("sent", "orders")}

    def test_of_a_rare_topic_are_looked_for_among_the_newest(self, look, messages):
        page = look("messagerow_changelist", topic="rare")

        assert page.context["cl"].result_count == looked_at(messages) // 1000 + 1
        assert f"only the newest {looked_at(messages):,} rows were read" in page.text

    def test_are_found_by_key(self, look, messages):
        (row,) = look("messagerow_changelist", q="4711").context["cl"].result_list

        assert row.key == "4711"

    def test_are_found_by_the_row_they_are_about(self, look, messages):
        (row,) = look("messagerow_changelist", q="shop.order:4710").context["cl"].result_list

        assert row.key == "4710"

    def test_are_found_by_id(self, look, messages):
        one = a_message(state=State.SENT)

        assert [row.id for row in look("messagerow_changelist", q=str(one.id)).context["cl"].result_list] == [one.id]

    @pytest.mark.parametrize("asked", [{}, {"state": "dead"}, {"state": "sent", "since": "hour"}, {"topic": "rare"}])
    def test_are_looked_for_by_a_field_among_the_newest(self, asked, look, messages):
        found = look("messagerow_changelist", q="invoice=2", **asked).context["cl"]

        assert found.result_count == 0
        assert (found.floor is None) == (messages <= MAX_MESSAGES_READ or ("since" in asked and messages < 360_000))

    @pytest.mark.parametrize("asked", [{}, {"state": "sent"}, {"state": "dead"}, {"since": "hour"}])
    @pytest.mark.parametrize("q", ["nix", "shop.order:11", "nix=1"])
    def test_are_looked_for_in_vain(self, q, asked, look, messages):
        assert look("messagerow_changelist", q=q, **asked).context["cl"].result_count == 0

    @pytest.mark.parametrize("state", [State.SENT, State.DEAD, State.PREPARED, State.RELEASED])
    def test_are_shown_with_their_life(self, state, look, messages):
        page = look("messagerow_change", a_message(state=state).id)

        assert "Claimed" in page.text

    def test_are_shown_with_what_the_books_say(self, look, messages):
        oldest = MessageRow.objects.order_by("id").first()

        told = [moment["what"] for moment in look("messagerow_change", oldest.id).context["moments"]]

        assert {"Published", "Claimed", "Check-back: COMMIT", "Failed", "Handled", "Delivered"} <= set(told)


class TestTheRowsOfAProject:
    @pytest.mark.parametrize(("key", "count"), [(4710, 1), (4711, 0)])
    def test_are_shown_with_their_messages(self, key, count, look, messages):
        order = Order.objects.create(pk=key, invoice=f"I{key}", country="", total=1, invoiced_at="2010-12-01T08:26:00Z")

        assert look("shop_order_change", order.pk).text.count('class="outbox-id"') == count


class TestOthers:
    @pytest.mark.parametrize(
        ("view", "parameters"),
        [
            ("inboxrow_changelist", {}),
            ("inboxrow_changelist", {"group": "cart"}),
            ("inboxrow_changelist", {"topic": "shipments"}),
            ("inboxrow_changelist", {"q": "00000000-0000-7000-8000-000000000001"}),
            ("checkback_changelist", {}),
            ("checkback_changelist", {"answer": "UNKNOWN"}),
            ("checkback_changelist", {"q": "4711"}),
            ("checkback_changelist", {"since": "hour"}),
            ("checkback_changelist", {"from": "2020-01-01T00:00", "to": "2020-01-02T00:00"}),
            ("checkback_changelist", {"since": "week", "answer": "UNKNOWN"}),
            ("inboxrow_changelist", {"since": "day", "topic": "shipments"}),
            ("inboxrow_changelist", {"to": "2020-01-02T00:00"}),
            ("messagerow_changelist", {"since": "week", "state": "dead"}),
            ("messagerow_changelist", {"from": "2020-01-01T00:00", "to": "2020-01-02T00:00", "topic": "rare"}),
            ("messagerow_changelist", {"to": "2020-01-02T00:00", "state": "sent"}),
            ("embedded_embeddedhalf_changelist", {"since": "hour", "state": "committed"}),
            ("embedded_embeddedhalf_changelist", {}),
            ("embedded_embeddedhalf_changelist", {"state": "parked"}),
            ("embedded_embeddedhalf_changelist", {"state": "committed"}),
            ("deadmessage_changelist", {}),
        ],
    )
    def test_are_listed(self, view, parameters, look, messages):
        look(view, **parameters)
