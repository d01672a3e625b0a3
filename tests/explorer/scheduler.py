"""
The scheduler: actors are threads, and only the one that was chosen runs, until it is about to make its next step.

A step is one SQL statement or one call of the broker. The list of decisions, which actor went on and what happened to its
step, is all that a schedule is made of: the same decisions lead to the same trace.
"""

from __future__ import annotations

import enum
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.explorer.clock import CLOCK

STUCK_SECONDS = 60.0  # of real time: an actor that neither stops nor ends by then hangs


class Killed(BaseException):
    """The process of this thread was killed: nothing that it still does has an effect."""


class Fault(enum.StrEnum):
    """What happens to a step. LATE: the request arrives later."""

    NONE = ""
    LOST_REQUEST = "the request is lost"
    LOST_REPLY = "the reply is lost"
    LATE = "the request is late"
    TWICE = "the request arrives twice"
    KILL = "killed before"


class State(enum.Enum):
    """Of an actor. BLOCKED: its statement waits in the database for a lock."""

    READY = 1
    BLOCKED = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of a schedule: who goes on, and what happens to the step."""

    actor: str
    fault: Fault = Fault.NONE


@dataclass(slots=True)
class Step:
    """
    A step that an actor is about to make, and its outcome.

    Args:
        faults: what may happen to it.
        is_decisive: whether it changes what others rely on. Most errors need an actor that was stopped before such a step.
    """

    label: str
    faults: Sequence[Fault] = ()
    is_decisive: bool = False
    outcome: str = ""


class Policy(Protocol):
    """Chooses who goes on."""

    def choose(self, ready: Sequence[Actor]) -> Decision:
        """Return the decision for the next step of one of the actors."""


class Actor:
    """
    One process of a schedule, in a thread of its own.

    Args:
        body: what it does; it calls `stop` before each step.
        on_kill: closes the connections of an actor that was killed, as the end of its process would.
    """

    def __init__(self, name: str, body: Callable[[Actor], None], *, on_kill: Callable[[Actor], None]) -> None:
        self.name = name
        self.state = State.READY
        self.step = Step("before its first step")
        self.is_killed = False
        self.must_give_up = False  # its wait for a lock ends with an error
        self.is_idle = False  # it found nothing to do, and looks again
        self.error: BaseException | None = None
        self._body, self._on_kill = body, on_kill
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._fault = Fault.NONE
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which goes on to its first stop."""
        self._thread.start()
        self._wait()

    def go_on(self, fault: Fault = Fault.NONE) -> None:
        """Let the actor go on until its next stop; called by the scheduler."""
        self._fault = fault
        if fault is Fault.KILL:
            self.is_killed = True
            self._on_kill(self)
        self._go.release()
        self._wait()

    def stop(self, label: str, faults: Sequence[Fault] = (), *, is_decisive: bool = False) -> Fault:
        """
        Stop before a step until the scheduler lets this actor go on; called in its thread.

        Raises:
            Killed: it does not go on.
        """
        if self.is_killed:
            raise Killed
        self.step = Step(label, faults, is_decisive)
        self._pause(State.READY)
        if self.is_killed:
            raise Killed
        return self._fault

    def block(self) -> None:
        """Report that the statement under way waits for a lock, until the scheduler has this actor look again."""
        self._pause(State.BLOCKED)

    def resume(self) -> None:
        """Report that the statement has ended that waited; stop until the scheduler lets this actor go on."""
        self._pause(State.READY)

    def restart(self) -> None:
        """Begin as a new process after the end of a killed one."""
        self.is_killed = False
        self.stop("starts again")

    def _pause(self, state: State) -> None:
        self.state = state
        self._stopped.release()
        self._go.acquire()

    def _wait(self) -> None:
        if not self._stopped.acquire(timeout=STUCK_SECONDS):
            raise RuntimeError(f"{self.name} hangs after {self.step.label!r}: it waits for something that is not a step.")

    def _run(self) -> None:
        CLOCK.threads.add(threading.get_ident())
        ACTORS[threading.get_ident()] = self
        try:
            self._body(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            del ACTORS[threading.get_ident()]
            CLOCK.threads.discard(threading.get_ident())
            self.state = State.DONE
            self._stopped.release()


ACTORS: dict[int, Actor] = {}


def current() -> Actor | None:
    """Return the actor of this thread; None in others."""
    return ACTORS.get(threading.get_ident())


@dataclass(slots=True)
class Trace:
    """What happened, line by line."""

    lines: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def digest(self) -> str:
        """Return a hash of all lines: two runs with the same one went the same way."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]


class Scheduler:
    """
    Runs actors by the decisions of a policy until all have ended.

    Args:
        limit: the most steps; more are an endless loop.
    """

    def __init__(self, actors: Sequence[Actor], policy: Policy, *, limit: int = 5_000) -> None:
        self.actors = list(actors)
        self.policy = policy
        self.trace = Trace()
        self._limit = limit

    def run(self) -> Trace:
        """Run until all actors have ended; return what happened."""
        for actor in self.actors:
            actor.start()
        while ready := self._ready():
            if len(self.trace.lines) >= self._limit:
                raise RuntimeError(f"The schedule has not ended after {self._limit} steps.")
            decision = self.policy.choose(ready)
            actor = next(one for one in ready if one.name == decision.actor)
            step = actor.step
            actor.go_on(decision.fault)
            self.trace.decisions.append(decision)
            self._note(actor, step, decision.fault)
            self._look_at_blocked()
        for actor in self.actors:
            if actor.error is not None:
                raise RuntimeError(f"{actor.name} failed after {actor.step.label!r}") from actor.error
        return self.trace

    def _ready(self) -> list[Actor]:
        ready = [one for one in self.actors if one.state is State.READY]
        if ready:
            return ready
        blocked = [one for one in self.actors if one.state is State.BLOCKED]
        if blocked:  # each waits for another, or for one that has ended: the server would break it off by a time-out
            blocked[0].must_give_up = True
            self._look_at_blocked()
        return [one for one in self.actors if one.state is State.READY]

    def _look_at_blocked(self) -> None:
        for actor in self.actors:
            if actor.state is State.BLOCKED:
                actor.go_on()

    def _note(self, actor: Actor, step: Step, fault: Fault) -> None:
        ending = " (waits for a lock)" if actor.state is State.BLOCKED else f" -> {step.outcome}" if step.outcome else ""
        self.trace.lines.append(f"{actor.name:12} {step.label}{f' [{fault}]' if fault else ''}{ending}")
