"""A job's parent: `--with-parent` ties a job to the process that started it, by the pipe at its standard input."""

from __future__ import annotations

import os
import signal
import threading

HELP = "end as soon as standard input does: whoever held it is gone"


def end_with_it() -> None:
    """Interrupt this process when its parent is gone, as Ctrl-C does: it takes its folders and its JVM along."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    main = threading.main_thread().ident or 0

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that waits in there aborts the interpreter's end
            pass
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
