"""Compare the packages: the cost of a message for its transaction, the cost of a relay, and the latency to the broker."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.figure import Figure, percentile
from benchmarks.peers.processes import PYTHON, Peer, PeerError, cpu_seconds

PACKAGES = {
    "ours": "this package",
    "outbox_pattern": "django-outbox-pattern",
    "jaiminho": "django-jaiminho",
    "celery_outbox": "django-celery-outbox",
    "reliable_outbox": "django-reliable-outbox",
    "procrastinate": "procrastinate",
}
MESSAGES = 10_000  # that wait when a relay starts
MORE_MESSAGES = {"ours": 50_000}  # for a relay that would be done with those before it is measured
PATIENCE_SECONDS = 300
PAUSE_SECONDS = 0.1  # between the messages of the trickle
SHARES = 0.1, 0.9  # of the messages, between which a relay is measured: it has started, and has not ended


@dataclass
class _Result:
    """The results of one package (microseconds, messages per second, microseconds, milliseconds), or its failure."""

    without: list[float] = field(default_factory=list)
    along: list[float] = field(default_factory=list)
    rate: float = 0
    cpu: float = 0
    late: list[float] = field(default_factory=list)
    failure: str = ""


def measure(scale: float) -> list[Figure]:
    """Measure the writes of all packages, in rounds that alternate between them, then their relays one after the other."""
    assert PYTHON.exists(), "The packages have an environment of their own: make bench-peers"
    with tempfile.TemporaryDirectory(prefix="outbox-peers-") as folder:
        peers = {name: Peer(name, Path(folder)) for name in PACKAGES}
        results = {name: _Result() for name in PACKAGES}
        for name, peer in peers.items():
            _attempt(results[name], peer.open)
        for _ in range(max(5, int(200 * scale))):
            for name, peer in peers.items():
                _attempt(results[name], partial(_measure_write, peer, results[name]))
        for name, peer in peers.items():
            print(f"    the relay of {PACKAGES[name]} ...", file=sys.stderr, flush=True)
            waiting = int(MORE_MESSAGES.get(name, MESSAGES) * scale)
            _attempt(results[name], partial(_measure_relay, peer, results[name], waiting, int(200 * scale)))
            peer.close()
        return [_figure(peer, results[name]) for name, peer in peers.items()]


def _attempt(result: _Result, act: Callable[[], None]) -> None:
    """Run a step unless the package has failed before; a failure only ends that package's measurements."""
    if not result.failure:
        try:
            act()
        except PeerError as error:
            result.failure = str(error)


def _measure_write(peer: Peer, result: _Result) -> None:
    result.without.append(peer.ask("without"))
    result.along.append(peer.ask("along"))


def _measure_relay(peer: Peer, result: _Result, count: int, late: int) -> None:
    waiting = peer.ask("fill", count)
    low, high = (int(waiting * share) for share in SHARES)
    with peer.relay() as relay:
        _wait_for(peer, relay, lambda: peer.taken() >= low)
        began, cpu, first = time.monotonic(), cpu_seconds(relay), peer.taken()
        _wait_for(peer, relay, lambda: peer.taken() >= high)
        seconds, spent, done = time.monotonic() - began, cpu_seconds(relay) - cpu, peer.taken() - first
        result.rate, result.cpu = done / seconds, spent / done * 1e6
        _wait_for(peer, relay, lambda: peer.taken() >= waiting)
        committed = peer.ask("trickle", late, PAUSE_SECONDS)
        _wait_for(peer, relay, lambda: peer.taken() >= waiting + len(committed))
    taken = peer.times()
    result.late = [(taken[number] - moment) * 1000 for number, moment in committed.items()]


def _wait_for(peer: Peer, relay: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if relay.poll() is not None:
            raise PeerError(f"the relay ended: {peer.explain()}")
        if time.monotonic() > deadline:
            raise PeerError(f"{peer.taken()} messages were relayed in {PATIENCE_SECONDS} s; {peer.explain()}")
        time.sleep(0.002)


def _figure(peer: Peer, result: _Result) -> Figure:
    name = f"{PACKAGES[peer.name]} {peer.version}: write p50"
    if not result.along:
        return Figure(name, 0, "us", None, at_most=True, note=f"not measured: {result.failure}")
    value, bound = statistics.median(result.along), statistics.median(result.without)
    note = result.failure or (
        f"relay {result.rate:,.0f} messages/s, {result.cpu:,.0f} us CPU per message; commit to broker p50 "
        f"{percentile(result.late, 0.5):,.1f} ms, p99 {percentile(result.late, 0.99):,.1f} ms"
    )
    return Figure(name, value, "us", None, at_most=True, bound=bound, note=note)
