"""The Python of a cluster's executors."""

import io
import re

import pytest

from outbox.pipeline.spark.session import find_faults, source_digest
from tests.outbox.pipeline.spark.cluster.commands import BARE, run

pytestmark = pytest.mark.slow

OTHER_VERSION = """
import collections, sys
sys.version_info = collections.namedtuple("version_info", "major minor micro releaselevel serial")(3, 99, 0, "final", 0)
"""


class TestAWrongPython:
    def test_is_one_error_before_any_work(self, outbox, of_page, monkeypatch):
        monkeypatch.setenv("PYSPARK_PYTHON", str(BARE))
        log = io.StringIO()

        said, code = run(of_page("python manage.py outbox_audit --master"), log=log)

        assert code == 2
        assert re.search(
            r"The executors cannot run the job\. .*No module named 'numpy'; .*No module named 'pyarrow'.*PYSPARK_PYTHON", said
        )
        assert "reading" not in log.getvalue()

    def test_of_another_minor_version_is_named(self, outbox, of_page, monkeypatch, tmp_path):
        other = tmp_path / "other"
        other.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {BARE} "$@"\n')
        other.chmod(0o755)
        (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
        monkeypatch.setenv("PYSPARK_PYTHON", str(other))

        said, code = run(of_page("python manage.py outbox_audit --master"))

        assert code == 2
        assert re.search(r"The executors cannot run Python 3\.\d+\.\d+ as '.*/other': .*different version: 3\.99", said)

    def test_with_another_release_of_the_package_is_named(self):
        assert list(find_faults(["json"], source_digest(), [])) == []

        [fault] = find_faults([], "of another release", [])

        assert fault.endswith("session.py is of another release of django-transactional-outbox")
