"""
AsyncAPI documents held to the official schema, which npm fetches once.

Asks the package index, so it runs where it is asked for: `make test-wheel`.
"""

import fcntl
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outbox import message
from outbox.catalogue.asyncapi import document
from outbox.catalogue.entries import read_entries
from outbox.consuming import register
from tests.journeys.readme import ROOT
from tests.outbox.catalogue.declared import EMBEDDED, KAFKA, RABBITMQ, ROCKETMQ, SECRET, declare, outbox_settings

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(300)]

VERSION = "6.11.1"
PACKAGE = ROOT / f"var/asyncapi/specs-{VERSION}.tgz"
SCHEMA = "package/schemas/3.0.0-without-$id.json"  # its references are to its own definitions


@pytest.fixture(scope="module")
def schema() -> Any:
    """The schema of AsyncAPI 3.0.0."""
    if shutil.which("npm") is None:
        pytest.skip("There is no npm. On Debian and Ubuntu: apt-get install npm")
    PACKAGE.parent.mkdir(parents=True, exist_ok=True)
    with PACKAGE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several who ask one fetches, and the others wait for it
        if not PACKAGE.exists():
            fetch()
    with tarfile.open(PACKAGE) as archive, archive.extractfile(SCHEMA) as file:
        return json.load(file)


def fetch() -> None:
    with tempfile.TemporaryDirectory(dir=PACKAGE.parent) as part:
        subprocess.run(["npm", "pack", "--silent", f"@asyncapi/specs@{VERSION}", "--pack-destination", part], check=True)
        (packed,) = Path(part).iterdir()
        packed.rename(PACKAGE)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No types and handlers but those of a test."""
    monkeypatch.setattr(message, "registered", {})
    monkeypatch.setattr(register, "registered", {})


class TestADocument:
    @pytest.mark.parametrize("broker", [EMBEDDED, RABBITMQ, KAFKA, ROCKETMQ], ids=lambda one: one["BACKEND"].rpartition(".")[2])
    def test_is_valid(self, broker, schema, settings):
        settings.OUTBOX = outbox_settings(broker)
        declare()

        found = document(read_entries())

        assert list(jsonschema.Draft7Validator(schema).iter_errors(found)) == []
        assert SECRET not in json.dumps(found)

    def test_with_a_field_that_asyncapi_does_not_have_is_refused(self, schema, settings):
        settings.OUTBOX = outbox_settings(EMBEDDED)
        found = document(read_entries())

        found["channels"]["orders"]["topic"] = "orders"

        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate(found)
