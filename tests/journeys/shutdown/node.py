"""A RocketMQ that can be frozen, and one for all tests of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from project.servers.rocketmq import RocketMQ


class Node(RocketMQ):
    """A node whose programs are `namesrv`, and `broker` with the proxy in it."""

    @contextmanager
    def frozen(self, *names: str) -> Iterator[None]:
        """Freeze programs for a while. Connections stay, and new ones wait."""
        pids = [self._processes[name].pid for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Stop broker and proxy for a while."""
        self.kill_broker()
        try:
            yield
        finally:
            self.start_broker()
