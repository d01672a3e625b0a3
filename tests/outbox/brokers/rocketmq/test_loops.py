"""Event loops that links hand on to each other."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from outbox.brokers.rocketmq import loops
from outbox.errors import ConfigurationError


async def _thread() -> int:
    return threading.get_ident()


def run(loop: asyncio.AbstractEventLoop) -> int:
    return asyncio.run_coroutine_threadsafe(_thread(), loop).result(60)


class TestLoops:
    def test_are_each_taken_by_one(self):
        taken = [loops.take() for _ in range(2)]

        assert len({run(loop) for loop in taken}) == 2
        for loop in taken:
            loops.give_back(loop)

    def test_are_taken_again_and_still_run(self):
        first = loops.take()
        thread = run(first)
        loops.give_back(first)

        again = loops.take()

        assert again is first
        assert run(again) == thread
        loops.give_back(again)

    def test_are_left_to_the_parent_by_a_fork(self):
        loops.give_back(loops.take())

        child = os.fork()
        if child == 0:  # the parent's threads are not here, and on its loops nothing would run
            try:
                run(loops.take())
                os._exit(0)
            finally:
                os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestGevent:
    def test_is_refused_since_a_loop_needs_a_thread(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched={"threading"}.__contains__))

        with pytest.raises(ConfigurationError, match="gevent has replaced them"):
            loops.take()
