"""
The set-up `plain`, and one with async views, on each version of Django that the package supports.

Asks the package index for them. Django 6 needs Python 3.12: `PYTHON` names it where `python3.12` and later are not on the PATH.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.setups, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

CANDIDATES = [os.environ.get("PYTHON", ""), sys.executable, "python3.14", "python3.13", "python3.12"]


def new_enough() -> str:
    """Return a Python for Django 6."""
    for candidate in CANDIDATES:
        ask = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]
        if shutil.which(candidate) and subprocess.run(ask, capture_output=True).returncode == 0:
            return candidate
    pytest.skip("There is no Python 3.12 or later, which Django 6 needs: set PYTHON to one.")


@pytest.fixture(scope="module", params=["5.2", "6.0", "6.1"])
def django(request, tmp_path_factory):
    """Install a version of Django beside what the package needs; return it, and the environment's Python."""
    python = sys.executable if request.param == "5.2" else new_enough()
    folder = tmp_path_factory.mktemp("environment")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = [f"Django=={request.param}.*", "psycopg[binary]", "dj-database-url"]
    packages += [one for one in needed if not one.startswith("Django")]
    subprocess.run([python, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)
    return request.param, str(folder / "bin/python")


@pytest.mark.parametrize("setup", ["plain", "asgi"])
def test_version(setup, django, databases, play):
    version, python = django

    said = play(setup, databases(f"setup_{setup}_{version}"), python=python)

    assert f"Django {version}" in said
    assert "handled, replayed" in said
