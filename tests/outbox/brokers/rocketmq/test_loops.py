"""Event loops that links hand on to each other."""

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from outbox.brokers.options import read_options
from outbox.brokers.rocketmq import loops
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.errors import ConfigurationError


async def _thread() -> int:
    return threading.get_ident()


def run(loop: asyncio.AbstractEventLoop) -> int:
    return asyncio.run_coroutine_threadsafe(_thread(), loop).result(60)


class TestLoops:
    def test_are_each_taken_by_one(self):
        taken = [loops.acquire() for _ in range(2)]

        assert len({run(loop) for loop in taken}) == 2
        for loop in taken:
            loops.release(loop)

    def test_are_taken_again_and_still_run(self):
        first = loops.acquire()
        thread = run(first)
        loops.release(first)

        again = loops.acquire()

        assert again is first
        assert run(again) == thread
        loops.release(again)

    def test_are_left_to_the_parent_by_a_fork(self):
        loops.release(loops.acquire())

        child = os.fork()
        if child == 0:  # the parent's threads are not here, and on its loops nothing would run
            try:
                run(loops.acquire())
                os._exit(0)
            finally:
                os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestClient:
    def test_takes_one_loop_though_several_threads_begin_at_once(self, monkeypatch: pytest.MonkeyPatch):
        taken: list[asyncio.AbstractEventLoop] = []
        acquire = loops.acquire

        def take_slowly() -> asyncio.AbstractEventLoop:
            taken.append(acquire())
            threading.Event().wait(0.05)  # long enough for the others to come
            return taken[-1]

        monkeypatch.setattr(loops, "acquire", take_slowly)
        client = RocketMQClient(read_options(RocketMQOptions, {"ENDPOINTS": "proxy:8081"}))
        with ThreadPoolExecutor(4) as pool:
            found = set(pool.map(lambda _: client.loop(), range(4)))
        client.close()

        assert found == set(taken)
        assert len(taken) == 1


class TestGevent:
    def test_is_refused_since_a_loop_needs_a_thread(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched={"threading"}.__contains__))

        with pytest.raises(ConfigurationError, match="gevent has replaced them"):
            loops.acquire()
