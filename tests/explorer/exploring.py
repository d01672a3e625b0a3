"""Run seed after seed, count, and report."""

from __future__ import annotations

import argparse
import logging
from collections import Counter

import django
import psycopg
from django.core.management import call_command
from django.db import connections

from tests.explorer import clock


def set_up() -> None:
    """Make the database of the explorer, and put the seams in."""
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute("CREATE DATABASE explorer")
        admin.execute(f"ALTER DATABASE explorer SET search_path = {clock.SCHEMA}, pg_catalog, public")
        admin.execute("ALTER DATABASE explorer SET deadlock_timeout = '1h'")
        admin.execute("ALTER SYSTEM SET autovacuum = off")
        admin.execute("SELECT pg_reload_conf()")
    with psycopg.connect(dbname="explorer", autocommit=True) as own:
        own.execute(clock.MAKE)
    django.setup()
    from django.conf import settings

    settings.DATABASES["default"]["NAME"] = "explorer"
    logging.disable(logging.CRITICAL)
    call_command("migrate", verbosity=0)
    connections.close_all()

    from outbox.consuming.lease_thread import LeaseThread
    from outbox.topics import write_topics
    from tests.explorer import shop, statements

    LeaseThread._run = lambda self: None  # type: ignore[method-assign]  # it lives by the machine's time
    monitor = psycopg.connect(dbname="explorer", autocommit=True)
    monitor.execute(shop.TABLES)
    statements.install(statements.Monitor(monitor))
    write_topics("default")


def explore(options: argparse.Namespace) -> int:
    """Explore as asked; return the exit code."""
    from tests.explorer.schedules import BROKERS, run_seed

    brokers = options.broker or list(BROKERS)
    if options.seed is not None:
        result = run_seed(options.seed, brokers)
        print(result.plan, *result.trace.lines, *result.problems, f"digest {result.trace.digest()}", sep="\n")
        return bool(result.problems)
    began = clock.real_monotonic()
    seed, failed, steps, counts = options.first, [], 0, Counter()
    while clock.real_monotonic() - began < options.seconds:
        result = run_seed(seed, brokers)
        steps += len(result.trace.lines)
        counts[result.plan.broker] += 1
        if result.problems:
            failed.append(seed)
            print(f"seed {seed} ({result.plan.broker}, {result.plan.kind}): {'; '.join(result.problems)}", flush=True)
        seed += 1
    took = clock.real_monotonic() - began
    done = seed - options.first
    print(f"{done} schedules, {steps} steps in {took:.0f} s: {done / took:.1f} a second. {len(failed)} failed.", dict(counts))
    return bool(failed)
