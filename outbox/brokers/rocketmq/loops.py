"""
Event loops, each in a thread of its own: one for each client, reused after the client is closed.

A loop is never closed. All loops of a process share gRPC's poller: an answer for a closed loop raises in another loop, which
then loses the answers that are queued after it.
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


def acquire() -> asyncio.AbstractEventLoop:
    """
    Return a running loop for exclusive use.

    Raises:
        ConfigurationError: gevent has replaced threads, so that a loop cannot run in one.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise ConfigurationError(
            "The RocketMQ broker needs threads, and gevent has replaced them in this process.",
            hint="Use threads or processes here. If only web workers run under gevent, call publish() there and run the "
            "relay elsewhere; do not use half first.",
        )
    try:
        return _free.pop()
    except IndexError:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="outbox-rocketmq", daemon=True).start()
        return loop


def release(loop: asyncio.AbstractEventLoop) -> None:
    """Return a loop on which nothing runs any more, for the next client."""
    _free.append(loop)
