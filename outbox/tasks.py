"""
Celery tasks: a nudge relays one post at once, beat's sweep relays whatever no nudge reported.

Celery closes Django's connections around each task and may fork at any time; so each task opens what it needs, and
nothing of it survives the task; but for the checker of a broker that asks by itself, which stays with its process.
"""

from __future__ import annotations

from contextlib import closing

from celery import shared_task

from outbox import conf
from outbox.check_backs.checker import brokers_that_ask, listen_in_this_process
from outbox.check_backs.loop import CheckLoop, brokers_to_ask_for
from outbox.consuming.gaps import find_gaps
from outbox.consuming.register import group as find_group
from outbox.consuming.register import groups
from outbox.consuming.worker import Worker
from outbox.relay import hosts
from outbox.relay.maintenance import maintain, prune_brokers
from outbox.relay.try_step import try_step


@shared_task(name="outbox.tasks.relay", ignore_result=True)
def relay(database: str = "default", broker: str = "default") -> None:
    """Relay what waits at one post; stay a moment, since one nudge stands for all commits of that moment."""
    settings = conf.settings().relay
    _listen(hosts.RelayTarget(database, broker))
    try_step(
        hosts.run_once,
        hosts.RelayTarget(database, broker),
        note="celery",
        at_most=settings.task_time,
        idle_timeout=hosts.IDLE_TIMEOUT,
    )


@shared_task(name="outbox.tasks.sweep", ignore_result=True)
def sweep() -> None:
    """Relay what waits anywhere, settle what was left behind, and ask for brokers that do not ask by themselves."""
    posts = hosts.relay_targets()
    for alias in brokers_to_ask_for({post.broker for post in posts}):
        with closing(CheckLoop(alias, posts[0].database)) as loop:
            try_step(loop.turn)
    for post in posts:
        _listen(post)
        at_most = conf.settings().relay.task_time / len(posts)
        try_step(hosts.run_once, post, note="celery", at_most=at_most, idle_timeout=hosts.NO_IDLE_TIMEOUT)


@shared_task(name="outbox.tasks.upkeep", ignore_result=True)
def upkeep() -> None:
    """Make days ahead, prune, and look for numbers that never came."""
    posts = hosts.relay_targets()
    for database in sorted({post.database for post in posts}):
        try_step(maintain, database)
    try_step(prune_brokers, {post.broker for post in posts})
    for group in groups().values():
        try_step(find_gaps, group)


@shared_task(name="outbox.tasks.consume", ignore_result=True)
def consume(group: str) -> None:
    """Hand what waits for a consumer group to its handlers, where no resident consumer does; beat calls it again."""
    chosen = find_group(group)
    for alias in chosen.brokers:
        at_most = conf.settings().consumer.task_time / len(chosen.brokers)
        with closing(Worker(chosen, alias)) as worker:
            worker.run(until_idle=True, seconds=at_most.total_seconds())


def _listen(post: hosts.RelayTarget) -> None:
    """Who sends half messages answers for them, too."""
    for alias in brokers_that_ask({post.broker}):
        try_step(listen_in_this_process, alias, post.database)
