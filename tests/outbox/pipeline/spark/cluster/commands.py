"""Commands of the pages, and what their reports say."""

import io
import shlex
import sys
from pathlib import Path
from typing import Any

from django.core.management import CommandError, call_command

ROOT = Path(__file__).resolve().parents[5]
BARE = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))


def run(line: str, *more: str, log: io.StringIO | None = None) -> tuple[str, Any]:
    """Run a command of a page in this process. Return what it printed, and its exit code."""
    _, _, command, *arguments = shlex.split(line)
    out = io.StringIO()
    try:
        call_command(command, *arguments, *more, stdout=out, stderr=log or io.StringIO())
    except SystemExit as error:
        return out.getvalue(), error.code
    except CommandError as error:
        return str(error), error.returncode
    return out.getvalue(), 0


def shape(report: dict[str, Any]) -> Any:
    names = ("kind", "stage", "topic", "group", "first", "last", "ids")
    return report["digest"], report["counts"], sorted([one[name] for name in names] for one in report["findings"])
