"""The table of a soak and its bounds."""

from tests.journeys.soak.bounds import BOUNDS, Row, as_text, compare

RELAY = ("memory (MiB)", "relay")
INBOX = ("size (MiB)", "outbox_inbox")


class TestCompare:
    def test_takes_the_largest_of_two_minutes_before_minute_5_and_before_the_end(self):
        samples = [
            (30, {RELAY: 99}),
            (200, {RELAY: 50}),
            (300, {RELAY: 40}),
            (400, {RELAY: 98}),
            (550, {RELAY: 60}),
            (600, {RELAY: 55}),
        ]

        [row] = compare(samples, 300)

        assert (row.early, row.end, row.ratio) == (50, 60, 1.2)

    def test_shows_what_was_not_there_at_minute_5(self):
        samples = [(300, {RELAY: 40}), (600, {RELAY: 40, INBOX: 3})]

        rows = compare(samples, 300)

        assert [(row.subject, row.early, row.end, row.ratio) for row in rows] == [
            ("relay", 40, 40, 1),
            ("outbox_inbox", 0, 3, None),
        ]


class TestRow:
    def test_is_over_its_bound_and_not_at_it(self):
        limit = 40 * BOUNDS["memory (MiB)"].factor + BOUNDS["memory (MiB)"].more

        assert not Row(*RELAY, early=40, end=limit).is_over
        assert Row(*RELAY, early=40, end=limit + 0.1).is_over


class TestAsText:
    def test_marks_what_is_over(self):
        table = as_text([Row(*RELAY, early=40, end=100), Row(*INBOX, early=1, end=1)])

        assert [line.split() for line in table.splitlines()] == [
            ["minute", "5", "end", "ratio", "limit"],
            ["memory", "(MiB):", "relay", "40", "100", "2.50", "46", "OVER"],
            ["size", "(MiB):", "outbox_inbox", "1", "1", "1.00", "2.5"],
        ]
