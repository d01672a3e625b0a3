"""The page for operators has the table of situations, neither less nor more."""

from pathlib import Path

from outbox.monitoring.attention import AttentionKind
from tests.journeys.attention.situations import SITUATIONS, table

# Kinds that no situation here leads to: only RocketMQ asks checkers, an extension that fails is tested beside the others
# (tests/outbox/test_extensions.py), as are sessions that block others (tests/outbox/monitoring/test_blocking.py), and the rest
# come beside a cause, or only after very many messages or minutes.
ELSEWHERE = {
    AttentionKind.NO_CHECKER,
    AttentionKind.EXTENSION_FAILS,
    AttentionKind.IGNORED,
    AttentionKind.LATE,
    AttentionKind.SEND_FAILS,
    AttentionKind.MOST_DEFERRED,
    AttentionKind.GIVEN_UP,
    AttentionKind.BLOCKED,
    AttentionKind.LONG_TRANSACTION,
}


class TestThePage:
    def test_has_the_table_of_situations(self):
        page = Path("docs/how-to/watch.md").read_text()

        section = page.partition("## Situations\n")[2].partition("\n## ")[0]
        assert [row for row in section.splitlines() if row.startswith("|")] == table().splitlines()


class TestTheTable:
    def test_has_a_situation_for_each_kind_of_entry(self):
        assert {*AttentionKind} - {one.id for one in SITUATIONS} == ELSEWHERE

    def test_has_each_situation_once(self):
        names = [one.name for one in SITUATIONS]

        assert len({*names}) == len(names)
