"""The lock files agree with pyproject.toml and with each other; no index is asked. `make lock` writes them."""

import re
import tomllib
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Each is named after the dependency group or the extra that it is made from; what the shop needs has no name.
FILES = sorted(path.name for path in ROOT.glob("requirements*.lock"))

HASHES = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
ENTRY = re.compile(rf"^([\w.-]+)(?:\[[^\]]*\])?==(\S+)(?: ; (.*?))? \\\n({HASHES})", re.MULTILINE)


@cache
def locked(file):
    """Return a lock file's pins: name -> [(version, marker or None)]."""
    found = {}
    for name, version, marker, _hashes in ENTRY.findall((ROOT / file).read_text()):
        found.setdefault(canonicalize_name(name), []).append((Version(version), Marker(marker) if marker else None))
    return found


def group(name):
    """Return a dependency group with those that it includes."""
    for entry in PYPROJECT["dependency-groups"][name]:
        if isinstance(entry, dict):
            yield from group(entry["include-group"])
        else:
            yield Requirement(entry)


def wanted(file):
    """Return all that a lock file is made from."""
    project = PYPROJECT["project"]
    name = file.removeprefix("requirements").removesuffix(".lock").lstrip("-") or "project"
    if name != "docs":  # Sphinx reads text only
        yield from map(Requirement, project["dependencies"])
    if name in PYPROJECT["dependency-groups"]:
        yield from group(name)
    else:
        yield from map(Requirement, project["optional-dependencies"][name])


class TestLockFiles:
    @pytest.mark.parametrize("file", FILES)
    def test_pin_what_pyproject_asks_for(self, file):
        pins = locked(file)
        unmet = [
            str(one)
            for one in wanted(file)
            if not any(version in one.specifier for version, _ in pins.get(canonicalize_name(one.name), []))
        ]

        assert unmet == []

    @pytest.mark.parametrize("file", FILES)
    def test_have_a_hash_for_every_line(self, file):
        lines = [line for line in (ROOT / file).read_text().splitlines() if re.match(r"[\w.-]+", line)]

        assert len(lines) == sum(map(len, locked(file).values()))

    @pytest.mark.parametrize("file", [file for file in FILES if file != "requirements.lock"])
    def test_name_the_same_versions(self, file):
        base = locked("requirements.lock")
        versions = {name: {version for version, _ in pins} for name, pins in base.items()}
        others = {name: {version for version, _ in pins} for name, pins in locked(file).items() if name in base}

        assert {name: found for name, found in others.items() if not found <= versions[name]} == {}

    def test_have_for_the_shop_what_celery_needs_over_redis(self):
        needed = [Requirement(text) for text in requires("kombu")]
        over_redis = {canonicalize_name(one.name) for one in needed if one.marker and one.marker.evaluate({"extra": "redis"})}

        assert "redis" in over_redis
        assert over_redis <= set(locked("requirements.lock"))
