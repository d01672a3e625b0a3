import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.test import override_settings

from outbox.api.cached import Cached
from tests.waiting import wait_until


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def readings():
    return []


@pytest.fixture
def kept(now, readings):
    def read():
        readings.append(len(readings) + 1)
        return readings[-1]

    return Cached(read, seconds=5, clock=lambda: now[0])


class TestKept:
    def test_reads_once_within_its_time(self, kept, now, readings):
        first = kept()
        now[0] += 4.9

        assert (first, kept(), readings) == (1, 1, [1])

    def test_reads_again_after_it(self, kept, now):
        first = kept()
        now[0] += 5

        assert (first, kept()) == (1, 2)

    def test_reads_again_when_settings_have_changed(self, kept):
        first = kept()

        with override_settings(OUTBOX={}):
            assert (first, kept()) == (1, 2)

    def test_has_many_who_ask_at_once_wait_for_one_reading(self, gate):
        readings = []

        def read():
            readings.append(gate.wait(30))
            return len(readings)

        kept = Cached(read, seconds=60)
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(kept) for _ in range(8)]
            wait_until(lambda: all(one.running() for one in asked))
            gate.set()

        assert [one.result() for one in asked] == [1] * 8

    def test_gives_the_last_answer_while_another_thread_reads(self, gate, now):
        is_reading = threading.Event()

        def read():
            if now[0] > 100:
                is_reading.set()
                gate.wait(30)
            return now[0]

        kept = Cached(read, seconds=5, clock=lambda: now[0])
        kept()
        now[0] += 6
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(kept)
            is_reading.wait(30)
            assert kept() == 100
            gate.set()

        assert other.result() == 106

    def test_does_not_keep_an_error(self, now):
        answers = iter([ValueError("away"), "here"])

        def read():
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        kept = Cached(read, seconds=5)
        with pytest.raises(ValueError, match="away"):
            kept()

        assert kept() == "here"

    def test_can_be_asked_in_a_child_of_a_fork_whose_parent_was_reading(self, gate):
        kept = Cached(lambda: gate.wait(30), seconds=5)
        reader = threading.Thread(target=kept)
        reader.start()
        wait_until(kept._lock.current.locked)

        child = os.fork()
        if not child:
            gate.set()
            os._exit(0 if kept() else 1)
        _, status = os.waitpid(child, 0)
        gate.set()
        reader.join()

        assert status == 0
