"""The open transaction behind a half message, as the admin's pages show it; over real connections."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from html import unescape
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group
from django.db import connection, connections
from django.test import Client
from django.urls import reverse
from django.utils.html import strip_tags
from msgspec.structs import replace

import outbox
from outbox import database
from outbox.admin.open_transactions import transaction_cell
from outbox.check_backs.sources import alias_of
from outbox.embedded.models import EmbeddedHalf, HalfState
from outbox.message import UNKNOWN, Token
from outbox.models import CheckBack
from outbox.monitoring import open_transactions
from outbox.monitoring.open_transactions import read_open_transactions
from tests.outbox.half_first.orders import announce, ask, half_first_token
from tests.outbox.half_first.test_tombstone import asked_about, in_thread
from tests.waiting import wait_until, wait_until_it_blocks

HALVES = "admin:outbox_embedded_embeddedhalf_changelist"
CHECK_BACKS = "admin:outbox_checkback_changelist"
HALVES_ONLY = ["view_embeddedhalf", "view_checkback"]
ALL = [*HALVES_ONLY, "view_messagerow"]
NAME = "Ann of 1 Secret Street"
ROLE = "outbox_reader_of_a_test"

IS_HELD = """
SELECT pid FROM pg_stat_activity WHERE application_name = 'shop web' AND state = 'idle in transaction' AND query ~ 'Secret'
"""


@pytest.fixture
def work(gate) -> Callable[[], object]:
    """A function that goes half first, writes a row, and waits at the gate with its transaction open."""

    @outbox.transactional(half_first=announce)
    def work(message):
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL application_name = 'shop web'")
            cursor.execute("UPDATE auth_group SET name = name WHERE name = 'staff'")
        Group.objects.create(pk=message.group_id, name=NAME)
        assert gate.wait(30)

    return work


@contextmanager
def held_open(work: Callable[[], object]) -> Iterator[int]:
    """Run a function that waits with its transaction open; give the process of its session."""
    with in_thread(work), database.connect("default") as own:
        [pid] = wait_until(lambda: own.execute(IS_HELD).fetchone())
        yield pid


def shown(client: Client, view: str = HALVES) -> str:
    """Return the text of the one row of a list."""
    [cell] = client.get(reverse(view)).text.split('field-transaction">')[1:]
    return text_of(cell.split("</td>")[0])


def text_of(cell: str) -> str:
    return unescape(strip_tags(cell.replace("<br>", "\n"))).strip()


@pytest.fixture
def store() -> Callable[..., EmbeddedHalf]:
    """Return a function that stores a half message with a token, whose transaction is not open."""

    def store(token: str, state: HalfState = HalfState.UNDECIDED) -> EmbeddedHalf:
        now, texts = datetime.now(UTC), dict.fromkeys(["source", "key", "tag"], "")
        fields = {"born_at": now, "ask_at": now, "headers": "{}", "body": b"", "token": token, "state": state, **texts}
        return EmbeddedHalf.objects.create(id=1, topic_id=1, queue=0, message_id=str(uuid4()), **fields)

    return store


@pytest.fixture
def frozen_server() -> Callable[[str], AbstractContextManager[None]]:
    """Return a context in which new connections to a database are accepted, and get no answer."""

    @contextmanager
    def frozen_server(alias: str) -> Iterator[None]:
        wrapper = connections[alias]
        alias_of(half_first_token(), otherwise="")  # which database has the source is known then
        before = wrapper.settings_dict
        with socket.create_server(("127.0.0.1", 0)) as server:
            options = {**before["OPTIONS"], "connect_timeout": 2}
            wrapper.settings_dict = {**before, "HOST": "127.0.0.1", "PORT": server.getsockname()[1], "OPTIONS": options}
            try:
                yield
            finally:
                wrapper.settings_dict = before

    return frozen_server


@pytest.fixture
def lesser_role() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Return a context in which new connections are of a role that may not see other roles' sessions."""
    with database.connect("default") as own:
        own.execute(f"CREATE ROLE {ROLE}; GRANT SELECT ON outbox_source TO {ROLE}")

    @contextmanager
    def lesser_role() -> Iterator[None]:
        options = connections["default"].settings_dict["OPTIONS"]
        connections["default"].settings_dict["OPTIONS"] = {**options, "assume_role": ROLE}
        try:
            yield
        finally:
            connections["default"].settings_dict["OPTIONS"] = options

    yield lesser_role
    with database.connect("default") as own:
        own.execute(f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")


class TestAnOpenTransaction:
    def test_is_shown_with_its_session_and_its_masked_statement(self, work, gate, operator):
        with held_open(work) as pid:
            text = shown(operator(*ALL))
            gate.set()

        assert text.startswith("Open for ")
        assert f"process {pid} (shop web), role " in text
        assert ", idle in transaction for " in text
        assert 'INSERT INTO "auth_group" ("id", "name") VALUES (•••, •••)' in text
        assert "Secret" not in text
        assert "waits for" not in text

    def test_is_shown_without_its_statement_to_who_may_not_view_messages(self, work, gate, operator):
        with held_open(work) as pid:
            text = shown(operator(*HALVES_ONLY))
            gate.set()

        assert f"process {pid} (shop web)" in text
        assert "INSERT" not in text

    def test_is_shown_with_what_blocks_it(self, work, gate, operator, other_connection):
        Group.objects.create(name="staff")
        with other_connection.transaction():
            other_connection.execute("UPDATE auth_group SET name = 'Secret' WHERE name = 'staff'")
            with in_thread(work):
                pid = wait_until_it_blocks(other_connection)
                text = shown(operator(*ALL))
                gate.set()
                other_connection.execute("COMMIT; BEGIN")

        assert f"process {pid} (shop web)" in text
        assert "active for " in text
        assert "Current statement: UPDATE auth_group SET name = name WHERE name = •••" in text
        blocking = f"It waits for process {other_connection.info.backend_pid} (outbox)"
        assert blocking in text
        assert "idle in transaction for " in text.partition(blocking)[2]
        assert text.endswith("WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))")

    def test_is_shown_beside_the_check_backs_that_it_kept_from_an_answer(self, work, gate, operator):
        client = operator(*ALL)
        with held_open(work) as pid:
            assert ask(asked_about()) is UNKNOWN
            while_open = shown(client, CHECK_BACKS)
            gate.set()
        afterwards = shown(client, CHECK_BACKS)

        assert f"process {pid} (shop web)" in while_open
        assert afterwards == "-"
        assert CheckBack.objects.get().reason == "Its transaction is still open."

    def test_is_found_by_one_statement_that_leaves_no_trace(self, work, gate, operator, asked):
        client = operator(*ALL)
        with held_open(work):
            asked.clear()
            shown(client)
            sent = [query for query, _ in asked if query == open_transactions.READ]
            written = [query for query, _ in asked if "INSERT" in str(query)]
            gate.set()

        assert len(sent) == 1
        assert written == []

    def test_is_half_hidden_from_another_role(self, work, gate, lesser_role):
        with held_open(work) as pid:
            half = asked_about()
            with lesser_role():
                found = read_open_transactions([(half.message_id, half.token)])
            gate.set()

        text = text_of(transaction_cell(found[half.message_id], with_query=True))
        assert text.startswith(f"Open: process {pid} (shop web), role ")
        assert text.endswith(f"\nThe rest is hidden from role {ROLE}: GRANT pg_read_all_stats TO {ROLE}.")
        assert text.count("\n") == 1


class TestATransactionThatIsNotOpen:
    def test_is_told_from_an_open_one_when_its_connection_was_closed(self, work, gate, operator):
        with held_open(work) as pid, database.connect("default") as own:
            own.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            text = shown(operator(*ALL))
            gate.set()

        assert text == (
            "No transaction is open: it has ended, or its connection was lost. The next check-back tells how it ended."
        )

    def test_is_not_looked_for_behind_the_half_message_of_a_relay(self, store, operator, asked):
        store(str(replace(Token.parse(half_first_token()), batch=17)))

        text = shown(operator(*ALL))

        assert text == "-"
        assert open_transactions.READ not in [query for query, _ in asked]

    @pytest.mark.parametrize("token", ["", "?", "a:b:c:d"])
    def test_is_not_looked_for_where_the_token_is_not_ours(self, store, operator, token):
        store(token)

        assert shown(operator(*ALL)) == "-"

    def test_is_not_looked_for_where_the_half_message_has_ended(self, store, operator, asked):
        store(half_first_token(), state=HalfState.ROLLED_BACK)

        operator(*ALL).get(reverse(HALVES), {"state": "rolled_back"})

        assert open_transactions.READ not in [query for query, _ in asked]


class TestADatabaseThatCannotTell:
    def test_is_named_by_its_source_where_it_is_unknown(self, store, operator):
        store("elsewhere:0:1:1")

        assert shown(operator(*ALL)) == "No database of this project with the source elsewhere answers."

    def test_is_named_where_it_takes_too_long(self, store, operator, monkeypatch):
        monkeypatch.setattr(open_transactions, "STATEMENT_SECONDS", 0.05)
        monkeypatch.setattr(open_transactions, "READ", "SELECT pg_sleep(20) WHERE %s::text[] IS NOT NULL")
        store(half_first_token())

        assert shown(operator(*ALL)) == "Database 'default' did not answer within 0.05 s."

    def test_is_named_where_it_is_frozen(self, store, frozen_server):
        half = store(half_first_token())

        with frozen_server("default"):
            found = read_open_transactions([(half.message_id, half.token)])

        assert found[half.message_id].startswith("Database 'default' cannot be queried: ")
        assert "timeout expired" in found[half.message_id]
