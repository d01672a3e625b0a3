from outbox.management.tables import table


class TestTable:
    def test_aligns_words_to_the_left_and_numbers_to_the_right(self):
        assert table(["name", "n", "note"], [["orders", 7, "x"], ["a", 1200, None]]).splitlines() == [
            "name       n  note",
            "orders     7  x",
            "a       1200",
        ]

    def test_shows_heads_without_rows(self):
        assert table(["name", "n"], []) == "name  n"
