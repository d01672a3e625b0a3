"""Run seed after seed, count, and report."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import psycopg
from django.core.management import call_command
from django.db import connections

from tests.explorer import clock

if TYPE_CHECKING:  # it imports the framework, which is imported after the clocks are replaced
    from tests.explorer.mutants import Mutant
    from tests.explorer.schedules import Result, Scope

SHRINK_SECONDS = 20.0  # of a control


def set_up() -> None:
    """Make the database of the explorer, and put the seams in."""
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute("CREATE DATABASE explorer")
        admin.execute(f"ALTER DATABASE explorer SET search_path = {clock.SCHEMA}, pg_catalog, public")
        admin.execute("ALTER DATABASE explorer SET deadlock_timeout = '1h'")
        admin.execute("ALTER DATABASE explorer SET synchronous_commit = off")
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

    LeaseThread._run = lambda self: None  # it lives by the machine's time
    monitor = psycopg.connect(dbname="explorer", autocommit=True)
    monitor.execute(shop.TABLES)
    statements.install(statements.Monitor(monitor))
    write_topics("default")


def explore(options: argparse.Namespace) -> int:
    """Explore as asked; return the exit code."""
    from tests.explorer.schedules import BROKERS, Scope

    scope = Scope(tuple(options.broker or BROKERS))
    if options.seed is not None:
        return _show(options.seed, scope, shrinks=options.shrink, mutant=options.mutant)
    if options.control:
        return _control(options)
    return _explore(options, scope)


def _show(seed: int, scope: Scope, *, shrinks: bool, mutant: str | None) -> int:
    """Run one seed, and print its trace, or that of a short schedule that fails alike."""
    from tests.explorer.mutants import MUTANTS
    from tests.explorer.schedules import run_seed
    from tests.explorer.shrink import Shrinker

    with MUTANTS[mutant].applied() if mutant else nullcontext():
        result = run_seed(seed, MUTANTS[mutant].scope if mutant else scope)
        if shrinks and result.problems:
            shrinker = Shrinker(result, seed=seed)
            long, result = len(result.trace.lines), shrinker.shrink()
            print(f"Shrunk from {long} to {len(result.trace.lines)} steps in {shrinker.runs} runs.")
    print(describe(result))
    return bool(result.problems)


def describe(result: Result) -> str:
    """Return a schedule as text: who took part, what happened, what is wrong."""
    plan = result.plan
    orders = [f"  {name}: {'; '.join(map(str, theirs))}" for name, theirs in plan.orders if theirs]
    before = [name for name, theirs in plan.orders if theirs and name not in plan.actors]
    early = [f"  placed before: the orders of {', '.join(before)}"] if before else []
    lines = [f"  {number:3} {line}" for number, line in enumerate(result.trace.lines, 1)]
    wrong = result.problems or ["all is as promised"]
    return "\n".join([f"Broker {plan.broker}, schedule {plan.kind}", *orders, *early, *lines, *wrong, result.trace.digest()])


def _explore(options: argparse.Namespace, scope: Scope) -> int:
    from tests.explorer.schedules import run_seed
    from tests.explorer.shrink import Shrinker

    began = clock.real_monotonic()
    seed, failed, steps, counts, traces = options.first, [], 0, Counter[str](), hashlib.sha256()
    last = options.first + (options.schedules or math.inf)
    while seed < last and clock.real_monotonic() - began < options.seconds:
        result = run_seed(seed, scope)
        steps += len(result.trace.lines)
        counts[f"{result.plan.broker}, {result.plan.kind}"] += 1
        traces.update(result.trace.digest().encode())
        if result.problems:
            failed.append(seed)
            print(f"Seed {seed} fails. To run it again: make explore ARGS='--seed {seed} --shrink'")
            print(describe(Shrinker(result, seed=seed).shrink()), flush=True)
        seed += 1
    took, done = clock.real_monotonic() - began, seed - options.first
    report = {
        "seconds": round(took, 1),
        "schedules": done,
        "schedules_per_second": round(done / took, 1),
        "steps": steps,
        "first_seed": options.first,
        "failed_seeds": failed,
        "by_broker_and_kind": dict(sorted(counts.items())),
        "digest": traces.hexdigest(),
    }
    _write(options.json, report)
    print(f"{done} schedules with {steps} steps in {took:.0f} s, {done / took:.1f} a second; {len(failed)} failed.")
    return bool(failed)


def _control(options: argparse.Namespace) -> int:
    """Take each rule out, and look for a seed that fails and for a short schedule; return whether none was found for one."""
    from tests.explorer.mutants import MUTANTS

    print("* Resend after discard is taken out, too: it is a second net under these.")
    print(f"{'rule':14} {'seed':>5} {'seconds':>7} {'steps':>5}  without it")
    rows = []
    for name in [options.mutant] if options.mutant else MUTANTS:
        with MUTANTS[name].applied():
            rows.append(row := _find(name, MUTANTS[name], options))
        seed, steps = ("-", "-") if row["seed"] is None else (row["seed"], row["steps"])
        print(f"{name:14} {seed:>5} {row['seconds']:7.1f} {steps:>5}  {row['found'] or 'NOT FOUND'}", flush=True)
    if options.mutant:
        print(rows[0]["trace"])
    _write(options.json, rows)
    return any(row["seed"] is None for row in rows)


def _find(name: str, mutant: Mutant, options: argparse.Namespace) -> dict[str, Any]:
    from tests.explorer.schedules import run_seed
    from tests.explorer.shrink import Shrinker, kinds

    began, seed = clock.real_monotonic(), options.first
    row: dict[str, Any] = {"name": name, "rule": mutant.rule, "seed": None, "found": "", "steps": None, "trace": ""}
    while row["seed"] is None and clock.real_monotonic() - began < options.seconds:
        result = run_seed(seed, mutant.scope)
        row["seconds"] = round(clock.real_monotonic() - began, 1)
        if kinds(result.problems) & mutant.kinds:
            short = Shrinker(result, seed=seed, seconds=SHRINK_SECONDS).shrink() if options.shrink else result
            row |= {"seed": seed, "found": result.problems[0], "steps": len(short.trace.lines), "trace": describe(short)}
        seed += 1
    return row


def _write(path: str | None, report: object) -> None:
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n")
