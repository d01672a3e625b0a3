"""
Run commands of a project in one process, each as manage.py does.

`python -m tests.journeys.newcomer.play '[["check"], ["outbox_relay", "--once"]]'`; a record separator begins each output.
"""

import json
import sys
import traceback

from django.core.management import execute_from_command_line

BEGIN = "\x1e"


def main() -> None:
    for arguments in json.loads(sys.argv[1]):
        sys.stdout.write(BEGIN)
        sys.stdout.flush()
        try:
            sys.argv = ["manage.py", *arguments]
            execute_from_command_line(sys.argv)
        except SystemExit:
            pass
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
