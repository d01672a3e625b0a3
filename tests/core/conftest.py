"""
The outbox without the apps of the embedded broker and of the pipeline: `make test-core`.

Those settings are of the whole process, so these tests are left out of every other run.
"""

from django.conf import settings

from tests.outbox.conftest import only_the_shops_types

__all__ = ["only_the_shops_types"]  # a fixture

IS_CORE = settings.SETTINGS_MODULE == "tests.core.settings"

collect_ignore_glob = [] if IS_CORE else ["test_*.py"]
