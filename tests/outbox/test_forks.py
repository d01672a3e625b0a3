import os
import threading

from outbox.forks import ForkSafeLock


def status_of(work):
    """Return the exit code of a forked child that does some work."""
    pid = os.fork()
    if pid == 0:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestForkSafeLock:
    def test_excludes_other_threads(self):
        lock = ForkSafeLock()

        with lock.current:
            assert not lock.current.acquire(blocking=False)

    def test_is_free_in_a_child_while_a_thread_of_its_parent_holds_it(self):
        lock, is_held, is_over = ForkSafeLock(), threading.Event(), threading.Event()

        def hold():
            with lock.current:
                is_held.set()
                is_over.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_held.wait(30)

        try:
            assert status_of(lambda: int(not lock.current.acquire(blocking=False))) == 0
            assert lock.current.locked()
        finally:
            is_over.set()
            thread.join()

    def test_lets_the_child_go_on_that_was_forked_by_its_holder(self):
        lock = ForkSafeLock()

        def leave():
            with lock.current:
                pid = os.fork()
            if pid == 0:
                os._exit(int(not lock.current.acquire(blocking=False)))
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        assert leave() == 0
