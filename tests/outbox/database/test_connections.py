"""Connections of our own."""

import pytest

from outbox import database


@pytest.mark.django_db
class TestConnect:
    def test_has_no_statement_compiled(self):
        with database.connect("default") as connection:
            assert connection.execute("SHOW jit").fetchone() == ("off",)
