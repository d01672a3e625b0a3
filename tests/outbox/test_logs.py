import io
import logging

import pytest

from outbox import logs
from outbox.logs import MAX_ERROR_CHARACTERS, MAX_LINES, MAX_TRACEBACK_CHARACTERS, get_logger, log_fields, one_line

FORGED = "of nobody\n2026-01-01 00:00:00 INFO outbox: all is well"


@pytest.fixture
def written():
    """The lines written by a handler with Python's default formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = get_logger("outbox.tests.logs")
    logger.addHandler(handler)
    yield lambda: stream.getvalue().splitlines()
    logger.removeHandler(handler)


@pytest.fixture
def logger(written):
    return get_logger("outbox.tests.logs")


class TestALineOfTheLog:
    @pytest.mark.parametrize("odd", ["\n", "\r", "\x00", "\x1b[2J", "\x85", "\u2028", "\u202e", "\ud800"])
    def test_keeps_what_others_sent_within_it(self, logger, written, odd):
        logger.warning("Message %s failed: %r", f"a{odd}b", f"a{odd}b")

        assert len(written()) == 1
        assert written()[0].isprintable()

    def test_shows_where_a_line_end_was(self, logger, written):
        logger.warning("Message %s failed.", FORGED)

        assert written() == [r"WARNING Message of nobody\n2026-01-01 00:00:00 INFO outbox: all is well failed."]

    def test_joins_what_libpq_continues_on_an_indented_line(self, logger, written):
        logger.warning("Waits: %s", """server at "db" failed: refused\n\tIs it 'up'?""")

        assert written() == ["""WARNING Waits: server at "db" failed: refused Is it 'up'?"""]

    def test_is_left_alone_where_nothing_is_odd(self, logger, written):
        logger.warning("Message %s of %r, %d of %.1f: Müller 🙂 'x'", "m-1", "orders", 1, 2.0)

        assert written() == ["WARNING Message m-1 of 'orders', 1 of 2.0: Müller 🙂 'x'"]

    def test_may_be_whole_already(self, logger, written):
        logger.error(f"Topic {FORGED}")

        assert len(written()) == 1

    def test_takes_its_arguments_by_name(self, logger, written):
        logger.error("%(topic)s: %(tries)d", {"topic": FORGED, "tries": 3})

        assert len(written()) == 1
        assert written()[0].endswith(": 3")

    def test_keeps_an_errors_text_within_it(self, logger, written):
        logger.error("Failed: %s, %r", ValueError(FORGED), ValueError(FORGED))

        assert len(written()) == 1
        assert "ValueError('of nobody" in written()[0]

    def test_is_followed_by_an_indented_traceback(self, logger, written):
        try:
            raise ValueError(FORGED)
        except ValueError:
            logger.exception("Failed.")

        first, *others = written()
        assert first == "ERROR Failed."
        assert others[0] == "  Traceback (most recent call last):"
        assert all(line.startswith("  ") for line in others)

    def test_comes_once_however_often_its_logger_is_asked_for(self, logger, written):
        get_logger(logger.name).warning("a\nb")

        assert written() == [r"WARNING a\nb"]


class TestARepeatedLine:
    @pytest.fixture
    def now(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(logs, "_repeats", logs.Repeats(clock=lambda: now[0]))
        return now

    @pytest.fixture
    def say(self, logger, now):
        def say(text, *args, level=logging.WARNING, **options):
            logger.log(level, text, *args, **options)

        logger.setLevel(logging.INFO)
        return say

    def test_is_written_once_a_minute_with_the_number_left_out(self, say, written, now):
        for seconds in range(62):
            now[0] = 100.0 + seconds
            say("PostgreSQL is away.")

        assert written() == ["WARNING PostgreSQL is away.", "WARNING PostgreSQL is away. (59 more times)"]

    def test_is_the_same_whatever_ids_and_numbers_it_has(self, say, written):
        for number in range(3):
            say(
                "Message 0199d3a4-1111-7000-8000-00000000000%s failed, next try in %.1f s: %r", number, number, ValueError(number)
            )

        assert len(written()) == 1

    def test_is_another_where_its_words_differ(self, say, written):
        for topic in ("orders", "payments", "orders"):
            say("Topic %r gets no answer.", topic)

        assert written() == ["WARNING Topic 'orders' gets no answer.", "WARNING Topic 'payments' gets no answer."]

    def test_has_its_traceback_only_once(self, say, written, now):
        for _ in range(2):
            say("It failed.", exc_info=ValueError("a bug"))
            now[0] += 60

        assert written() == ["WARNING It failed.", "  ValueError: a bug", "WARNING It failed."]

    def test_that_is_never_quite_the_same_comes_a_limited_number_of_times(self, say, written, now):
        for number in range(1000):
            say("It failed: %s", "x" * number)

        assert len(written()) == MAX_LINES

    def test_has_its_traceback_when_it_is_written_first_though_it_was_left_out_before(self, say, written, now):
        for number in range(MAX_LINES + 1):
            say("It failed: %s", "x" * number, exc_info=ValueError("a bug"))
        now[0] += 60

        say("It failed: %s", "x" * MAX_LINES, exc_info=ValueError("a bug"))

        assert written()[-2:] == [f"WARNING It failed: {'x' * MAX_LINES} (1 more time)", "  ValueError: a bug"]

    def test_is_the_same_where_its_cause_is(self, say, written):
        for cause, text in (("unsigned", "/a"), ("unsigned", "/b"), ("stale", "/a")):
            say("A request of %s is refused.", text, extra=log_fields(cause=cause))

        assert written() == ["WARNING A request of /a is refused."] * 2

    def test_for_the_record_is_the_same_only_with_its_numbers(self, say, written):
        for number in (1, 2, 2):
            say("%s dead messages were released.", number, level=logging.INFO)

        assert written() == ["INFO 1 dead messages were released.", "INFO 2 dead messages were released."]

    def test_does_not_raise_if_str_of_an_argument_raises(self, say, written):
        class Odd:
            def __str__(self):
                raise ZeroDivisionError

        say("It failed: %s", Odd())

        assert written() == ["WARNING It failed: (Odd, whose text cannot be had: ZeroDivisionError)"]


class TestALongError:
    LONG = "x" * 3_000_000

    @pytest.mark.parametrize("said", [LONG, ValueError(LONG)], ids=["text", "error"])
    def test_is_cut_in_its_line(self, logger, written, said):
        logger.error("It failed: %s", said)

        assert written() == [f"ERROR It failed: {'x' * (MAX_ERROR_CHARACTERS - 1)}…"]

    def test_is_cut_in_its_traceback(self, logger, written):
        logger.error("It failed.", exc_info=ValueError(self.LONG))

        assert sum(map(len, written())) < MAX_TRACEBACK_CHARACTERS + 100


class TestOneLine:
    def test_leaves_a_text_as_it_is(self):
        assert one_line('it\'s a \\ "text"') == 'it\'s a \\ "text"'
