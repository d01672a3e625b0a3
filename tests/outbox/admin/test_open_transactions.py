"""Statements of transactions as the admin shows them: without any value."""

import pytest

from outbox.admin.open_transactions import BLOCKING_SHOWN, masked, transaction_cell
from outbox.monitoring.open_transactions import DatabaseSession


def session(pid, **fields):
    shared = {"role": "shop", "application": "web", "client": "10.0.0.5", "state": "active", "query": "SELECT 'secret'"}
    times = {"open_seconds": 200.0, "state_seconds": 2.0, "is_hidden": False, "reader": "admin"}
    return DatabaseSession(pid, **shared | times | fields)


def cell(*sessions, with_query=True):
    return transaction_cell([*sessions], with_query=with_query)


class TestAStatement:
    @pytest.mark.parametrize(
        ("statement", "shown"),
        [
            ('SELECT a.b, "c d" FROM t1 WHERE e = $1', 'SELECT a.b, "c d" FROM t1 WHERE e = $1'),
            ("a = 'it''s' AND b = 'x'", "a = ••• AND b = •••"),
            ("a = 1 AND b = -2.5e-3 AND c = .5 AND d = 0x1F", "a = ••• AND b = -•••-••• AND c = ••• AND d = •••"),
            (r"a = E'it\'s' AND b = e'x'", "a = ••• AND b = •••"),
            ("SELECT $$x$$, $q$ it's $q$, é", "SELECT •••, •••, é"),
            ("SELECT a -- secret\nFROM b - c / d", "SELECT a •••\nFROM b - c / d"),
            ("SELECT /* a /* b */ secret */ a", "SELECT ••• a"),
            ("a = B'101' AND b = U&'x'", "a = B••• AND b = U&•••"),
            ("a->>'b' = ANY(ARRAY['x', 'y']::text[])", "a->>••• = ANY(ARRAY[•••, •••]::text[])"),
        ],
    )
    def test_is_shown_with_its_names_and_without_its_values(self, statement, shown):
        assert masked(statement) == shown

    @pytest.mark.parametrize(
        "value", ["'secret", "E'secret", r"E'it\'s secret", "$$secret", "$q$secret$", "/* secret", "'it''s secret"]
    )
    def test_is_hidden_from_a_value_on_that_was_cut_off(self, value):
        assert masked(f"SELECT a, {value}") == "SELECT a, •••"

    @pytest.mark.parametrize("value", [r"'it\'s secret', 'x'", r"'C:\' AND secret = 'x'", r"'a''b\' secret"])
    def test_is_hidden_from_a_backslash_on_that_may_or_may_not_escape_a_quote(self, value):
        assert masked(f"a = {value}") == "a = •••"


class TestACell:
    def test_names_the_session_and_what_it_runs(self):
        text = cell(session(4711))

        assert "Open for 3 min: <bdi>process 4711 (web), role shop, from 10.0.0.5, active for 2.0 s</bdi>" in text
        assert "Current statement: <code><bdi>SELECT •••</bdi></code>" in text

    def test_escapes_what_a_program_says_of_itself(self):
        assert "<script>" not in cell(session(1, application="<script>", query="SELECT <script>"))

    def test_names_a_prepared_transaction_that_blocks(self):
        assert "It waits for a prepared transaction, which has no process" in cell(session(1), session(0, role="", state=""))

    def test_counts_further_sessions_that_block(self):
        text = cell(session(1), *(session(pid) for pid in range(2, 4 + BLOCKING_SHOWN)))

        assert text.count("It waits for <bdi>process") == BLOCKING_SHOWN
        assert "It waits for 2 more" in text

    def test_has_no_statement_without_the_permission(self):
        assert "SELECT" not in cell(session(1), session(2), with_query=False)

    def test_is_empty_for_another_message(self):
        assert transaction_cell("", with_query=True) == ""
