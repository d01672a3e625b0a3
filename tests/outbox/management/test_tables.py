import pytest

from outbox.management.tables import age, table


class TestTable:
    def test_aligns_words_to_the_left_and_numbers_to_the_right(self):
        assert table(["name", "n", "note"], [["orders", 7, "x"], ["a", 1200, None]]).splitlines() == [
            "name       n  note",
            "orders     7  x",
            "a       1200",
        ]

    def test_shows_heads_without_rows(self):
        assert table(["name", "n"], []) == "name  n"


class TestAge:
    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(None, ""), (0.44, "0.4 s"), (45, "45 s"), (200, "3 min"), (7300, "2 h"), (259200, "3 d")],
    )
    def test_is_put_into_words(self, seconds, words):
        assert age(seconds) == words
