"""A job's parent: `--with-parent` ties a job to the process that started it, by the pipe at its standard input."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

HELP = "end as soon as standard input does: whoever held it is gone"


def interrupt() -> None:
    """Interrupt this process as a person would, so that it takes its folders and its JVM along."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def when_it_ends(act: Callable[[], None] = interrupt) -> None:
    """Have a thread call `act` when standard input ends."""

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that waits in there aborts the interpreter's end
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()
