"""The page for operators has the table of situations, neither less nor more."""

from pathlib import Path

from outbox.findings import RULE_FAILS, Needs, rules
from tests.journeys.attention.situations import SITUATIONS, table

# Kinds that no situation here leads to: only RocketMQ asks checkers, an extension that fails is tested beside the others
# (tests/outbox/test_extensions.py), as are sessions that block others (tests/outbox/monitoring/test_blocking.py), and the rest
# come beside a cause, or only after very many messages or minutes.
ELSEWHERE = {
    "outbox.no_checker",
    "outbox_pipeline.audit",
    RULE_FAILS,
    "outbox.ignored",
    "outbox.late",
    "outbox.send_fails",
    "outbox.max_deferred",
    "outbox.given_up",
    "outbox.long_transaction",
}


class TestThePage:
    def test_has_the_table_of_situations(self):
        page = Path("docs/how-to/watch.md").read_text()

        section = page.partition("## Situations\n")[2].partition("\n## ")[0]
        assert [row for row in section.splitlines() if row.startswith("|")] == table().splitlines()


class TestTheTable:
    def test_has_a_situation_for_each_kind_of_entry(self):
        live = {number for one in rules(Needs.STATUS, Needs.DATABASE) for number in one.ids} | {RULE_FAILS}
        assert live - {one.id for one in SITUATIONS} == ELSEWHERE

    def test_has_each_situation_once(self):
        names = [one.name for one in SITUATIONS]

        assert len({*names}) == len(names)
