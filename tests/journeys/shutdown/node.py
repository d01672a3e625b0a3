"""A RocketMQ that can be frozen, and one for all tests of a run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from project.servers.rocketmq import RocketMQ


class Node(RocketMQ):
    """A node whose programs are `namesrv`, and `broker` with the proxy in it."""

    @contextmanager
    def frozen(self, *names: str) -> Iterator[None]:
        """Freeze programs for a while. Connections stay, and new ones wait."""
        programs = [self._children[name] for name in names]
        for program in programs:
            program.send(signal.SIGSTOP)
        try:
            yield
        finally:
            for program in programs:
                program.send(signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Stop broker and proxy for a while."""
        self.kill_broker()
        try:
            yield
        finally:
            self.start_broker()
