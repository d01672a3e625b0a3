"""
Event loops, each in its own thread. One client at a time uses a loop; after the client is closed, another one may get the loop.

A loop is never closed, because all loops of a process share gRPC's poller: an answer for a closed loop would raise in another
loop, which would then lose the answers that are queued after it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from outbox.errors import ConfigurationError

_idle: list[asyncio.AbstractEventLoop] = []

# The child of a fork does not have the threads of these loops.
os.register_at_fork(after_in_child=_idle.clear)


def acquire() -> asyncio.AbstractEventLoop:
    """
    Return a running loop for exclusive use.

    Raises:
        ConfigurationError: gevent has replaced threads by greenlets, in which a loop cannot run.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise ConfigurationError(
            "The RocketMQ broker needs threads, and gevent has replaced them in this process.",
            hint="Use threads or processes here. If only web workers run under gevent, call publish() there and run the "
            "relay elsewhere; do not use half first.",
        )
    try:
        return _idle.pop()
    except IndexError:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="outbox-rocketmq", daemon=True).start()
        return loop


def release(loop: asyncio.AbstractEventLoop) -> None:
    """Keep a loop for the next client. Nothing may run in it any more."""
    _idle.append(loop)
