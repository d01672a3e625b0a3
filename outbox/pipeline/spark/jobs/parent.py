"""`--with-parent`: stop a job when the process that started it is gone, which closes the pipe at its standard input."""

from __future__ import annotations

import os
import signal
import threading

HELP = "stop when standard input is closed, because the parent process is gone"


def exit_with_parent() -> None:
    """Interrupt this process when its parent is gone, as Ctrl-C does, so that it deletes its folders and stops its JVM."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore SIGINT
    main = threading.main_thread().ident or 0

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that blocks in it breaks the interpreter's shutdown
            pass
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
