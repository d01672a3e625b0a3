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

    def test_keeps_a_row_in_one_line_whatever_it_says(self):
        lines = table(["topic", "reason"], [["orders", "no\nshipments  all is well\x1b[2J"]]).splitlines()

        assert lines == ["topic   reason", r"orders  no\nshipments  all is well\x1b[2J"]
