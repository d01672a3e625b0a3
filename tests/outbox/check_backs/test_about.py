import pytest
from django.contrib.auth.models import Group
from psycopg import sql

from outbox.check_backs.sources import IS_THERE, About, look_up
from tests.factories import MessageRowFactory


class TestLookUp:
    def test_finds_the_business_row(self, connection):
        group = Group.objects.create(name="a business row")
        message = MessageRowFactory(about=f"auth.group:{group.pk}")

        assert look_up(connection, str(message.id)) is About.EXISTS

    def test_misses_a_row_that_was_deleted(self, connection):
        message = MessageRowFactory(about="auth.group:4711")

        assert look_up(connection, str(message.id)) is About.MISSING

    def test_uses_the_index_of_the_primary_key(self, own_connection):
        query = sql.SQL("EXPLAIN " + IS_THERE).format(table=sql.Identifier("auth_group"), key=sql.Identifier("id"))
        own_connection.execute("SET enable_seqscan = off")

        plan = str(own_connection.execute(query, ["4711"]).fetchall())

        assert "Index Cond: (id = 4711)" in plan

    @pytest.mark.parametrize(
        "about",
        [
            None,
            "shop",
            "auth.group",
            "auth.group:",
            "auth.group:not a number",
            "auth.nobody:1",
            "nobody.group:1",
            "outbox.lane:1",  # its primary key has two columns
        ],
    )
    def test_finds_nothing_where_no_row_is_named(self, connection, about):
        message = MessageRowFactory(about=about)

        assert look_up(connection, str(message.id)) is About.NONE

    @pytest.mark.parametrize("message_id", ["018f6f3e-7f00-7000-8000-000000004711", "of another producer"])
    def test_finds_nothing_for_a_message_it_does_not_know(self, connection, message_id):
        assert look_up(connection, message_id) is About.NONE

    def test_gives_up_on_a_table_that_somebody_locks(self, own_connection, other_connection):
        message = MessageRowFactory(about="auth.group:4711")
        own_connection.execute("SET lock_timeout = '50ms'")

        with other_connection.transaction():
            other_connection.execute("LOCK TABLE auth_group")
            found = look_up(own_connection, str(message.id))

        assert found is About.NONE
