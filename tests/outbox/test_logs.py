import io
import logging

import pytest

from outbox.logs import LimitedLog, get_logger, one_line

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


class TestOneLine:
    def test_leaves_a_text_as_it_is(self):
        assert one_line('it\'s a \\ "text"') == 'it\'s a \\ "text"'


class TestLimitedLog:
    @pytest.fixture
    def now(self):
        return [100.0]

    @pytest.fixture
    def limited(self, logger, now):
        return LimitedLog(logger, interval=60, clock=lambda: now[0])

    def test_writes_one_line_for_a_cause(self, limited, written):
        for number in range(1000):
            limited.log(logging.WARNING, "unsigned", "A request of %s is not signed.", number)

        assert written() == ["WARNING A request of 0 is not signed."]

    def test_says_afterwards_how_many_it_left_out(self, limited, written, now):
        for _ in range(4):
            limited.log(logging.WARNING, "unsigned", "Not signed.")
        now[0] += 60
        limited.log(logging.WARNING, "unsigned", "Not signed.")
        now[0] += 60
        limited.log(logging.WARNING, "unsigned", "Not signed.")

        assert written() == [
            "WARNING Not signed.",
            "WARNING Not signed. (3 more since the last such line.)",
            "WARNING Not signed.",
        ]

    def test_writes_one_for_each_cause(self, limited, written):
        for cause in ("unsigned", "stale", "unsigned"):
            limited.log(logging.WARNING, cause, cause)

        assert written() == ["WARNING unsigned", "WARNING stale"]
