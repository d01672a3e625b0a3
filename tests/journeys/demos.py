"""A demo as a process of its own, for the tests of it."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psycopg
from django.conf import settings
from psycopg.conninfo import make_conninfo

from tests.waiting import wait_until

SERVER = os.environ["DATABASE_URL"]
MARK = "DEMO_TEST_MARK"

# What is booked for one invoice is gone at once: a lost effect.
SABOTAGE = """
CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN DELETE FROM shop_pointsentry WHERE id = NEW.id; RETURN NULL; END$$;
CREATE TRIGGER lose AFTER INSERT ON shop_pointsentry FOR EACH ROW WHEN (NEW.invoice = '536365') EXECUTE FUNCTION lose()
"""


class Demo:
    """
    A demo as a process of its own. All that it starts carries the mark in its environment.

    Args:
        folder: where it makes its files.
    """

    def __init__(self, folder, *arguments):
        self.mark = f"{MARK}={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        environment = {"DATABASE_URL": SERVER, "DJANGO_SETTINGS_MODULE": "project.settings", "TMPDIR": str(folder), name: value}
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "outbox_demo", *arguments],
            cwd=settings.BASE_DIR,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.folder = folder
        self.database = f"outbox_demo_{self.process.pid}"

    def finish(self, seconds=90):
        self.stdout, self.stderr = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def processes(self):
        """Count the living processes with the mark."""
        if not Path("/proc/self/environ").exists():
            listing = subprocess.run(["ps", "axeww", "-o", "command"], capture_output=True, text=True, check=True).stdout
            return listing.count(self.mark)
        return sum(self.mark in _environment_of(folder) for folder in Path("/proc").glob("[0-9]*"))

    def database_exists(self):
        with psycopg.connect(SERVER, autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.database])
            return found.fetchone() is not None

    def left_behind(self):
        """Count processes, databases and files."""
        return self.processes(), int(self.database_exists()), len(list(self.folder.iterdir()))

    def sabotage(self):
        """Lose an effect behind everybody's back."""
        wait_until(self.database_exists)
        with psycopg.connect(make_conninfo(SERVER, dbname=self.database), autocommit=True) as connection:
            wait_until(lambda: connection.execute("SELECT to_regclass('shop_pointsentry')").fetchone()[0], seconds=30)
            connection.execute(SABOTAGE)


def _environment_of(folder):
    try:
        return (folder / "environ").read_text(errors="replace").split("\0")
    except OSError:  # it has ended meanwhile, or belongs to somebody else
        return []
