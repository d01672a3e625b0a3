"""The workers of some groups, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from django.db import connections

from outbox.consuming.register import Group
from outbox.consuming.worker import Counts, Worker

PATIENCE_SECONDS = 15.0  # with --until-idle or --once, an outage that lasts longer ends the command


class ConsumerThreads:
    """
    Runs `threads` workers for each group and broker.

    Raises:
        UnknownTopic, ConfigurationError: a group's topics contradict the settings.
    """

    def __init__(self, groups: Sequence[Group], threads: int = 1) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.workers = [
            Worker(group, alias, stop=self._stop) for group in groups for alias in group.brokers for _ in range(threads)
        ]
        self.threads: list[threading.Thread] = []

    def start(self, *, until_idle: bool = False, once: bool = False) -> None:
        """
        Start the threads. Each ends when it is stopped, with `until_idle` when no message comes, with `once` after one batch.

        With `until_idle` or `once`, a longer outage of database or broker ends all threads; otherwise they wait until it is over.
        """
        for worker in self.workers:
            name = f"Consumer of group {worker.group.name!r}, broker {worker.alias!r}"
            thread = threading.Thread(target=self._work, args=(worker, until_idle, once), name=name, daemon=True)
            self.threads.append(thread)
            thread.start()

    def targets(self) -> set[tuple[str, str, str]]:
        """Return the database, broker and group of each worker."""
        return {(worker.group.using, worker.alias, worker.group.name) for worker in self.workers}

    def stop(self) -> None:
        """Ask each worker to finish its message and end; from any thread."""
        for worker in self.workers:
            worker.stop()

    def is_working(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self) -> None:
        """
        Wait until all threads have ended.

        Raises:
            BaseException: what ended a worker that was not stopped.
        """
        for thread in self.threads:
            thread.join()
        for failure in self._failures:
            raise failure

    def counts(self) -> dict[str, Counts]:
        """Return the counts of outcomes by group."""
        found: dict[str, Counts] = {}
        for worker in self.workers:
            counts = found.setdefault(worker.group.name, Counts())
            counts += worker.counts
        return found

    def _work(self, worker: Worker, until_idle: bool, once: bool) -> None:
        try:
            worker.run(until_idle=until_idle, once=once, patience=PATIENCE_SECONDS if until_idle or once else None)
        except BaseException as error:  # an interrupt in a thread reaches nobody by itself
            self._failures.append(error)
            self._stop.set()
        finally:
            worker.close()
            connections.close_all()
