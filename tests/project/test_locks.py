import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def locked(name):
    """Give the names in a lock file."""
    return {canonicalize_name(found) for found in re.findall(r"^([\w.-]+)==", (ROOT / name).read_text(), re.MULTILINE)}


class TestTheShopsLock:
    def test_has_what_celery_needs_over_redis(self):
        needed = [Requirement(text) for text in requires("kombu")]
        over_redis = {canonicalize_name(one.name) for one in needed if one.marker and one.marker.evaluate({"extra": "redis"})}

        assert "redis" in over_redis
        assert over_redis <= locked("requirements.lock")
