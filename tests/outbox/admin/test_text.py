from datetime import timedelta

import pytest
from django.utils import timezone

from outbox.admin.text import badge, plain, shown, since


class TestShown:
    def test_escapes_markup(self):
        assert shown("<script>alert(1)</script>") == "<bdi>&lt;script&gt;alert(1)&lt;/script&gt;</bdi>"

    @pytest.mark.parametrize("odd", ["\u202e", "\u2066", "\u200b", "\ufeff", "\x1b", "\r", "\x7f", "\u2028", "\U000e0041"])
    def test_marks_what_changes_how_a_line_reads(self, odd):
        assert shown(f"a{odd}b") == f'<bdi>a<span class="outbox-odd">U+{ord(odd):04X}</span>b</bdi>'

    def test_leaves_letters_of_all_scripts_lines_and_tabs_alone(self):
        assert shown("käse\tไทย\n日本") == "<bdi>käse\tไทย\n日本</bdi>"

    def test_cuts_before_it_escapes(self):
        assert shown("<<<<<", 2) == '<bdi title="&lt;&lt;&lt;&lt;&lt;">&lt;&lt;…</bdi>'

    def test_keeps_what_it_cuts_where_the_pointer_finds_it(self):
        assert shown('a" onclick="x\u202e', 1) == '<bdi title="a&quot; onclick=&quot;x[U+202E]">a…</bdi>'


class TestSince:
    def test_puts_the_time_into_words(self):
        assert since(timezone.now() - timedelta(minutes=5)) == "5 min"

    def test_says_nothing_of_no_time_and_no_negative_of_one_to_come(self):
        assert (since(None), since(timezone.now() + timedelta(hours=1))) == ("", "0.0 s")


class TestBadge:
    def test_escapes_its_word(self):
        assert badge("<", "bad") == '<span class="outbox-badge outbox-bad">&lt;</span>'


class TestPlain:
    def test_spells_out_what_changes_how_a_line_reads(self):
        assert plain("<a>\u202eb") == "<a>[U+202E]b"
