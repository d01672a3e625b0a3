"""
Event loops, each running in a thread of its own: one for each link, and when a link is closed, for the next one.

A loop is never closed. All loops of a process share gRPC's poller: an answer that comes for a closed loop is raised in
whichever loop has woken, and what waited behind it there is not handed out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from outbox.errors import ConfigurationError

_free: list[asyncio.AbstractEventLoop] = []

# Threads do not survive a fork.
os.register_at_fork(after_in_child=_free.clear)


def take() -> asyncio.AbstractEventLoop:
    """
    Return a running loop that nobody else has.

    Raises:
        ConfigurationError: gevent has replaced threads, and a loop has none to run in.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise ConfigurationError(
            "The RocketMQ broker needs threads, and gevent has replaced them in this process. Run it under threads or processes; "
            "where only web workers are gevent's, publish() there and relay elsewhere: half first is not for them."
        )
    try:
        return _free.pop()
    except IndexError:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="outbox-rocketmq", daemon=True).start()
        return loop


def give_back(loop: asyncio.AbstractEventLoop) -> None:
    """Keep a loop, on which nothing runs any more, for who takes the next."""
    _free.append(loop)
