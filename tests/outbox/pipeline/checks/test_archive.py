from datetime import timedelta

import pytest
from django.test import override_settings

from outbox.pipeline.checks import check_archive


def problems(archive, **more):
    with override_settings(OUTBOX={"PIPELINE": {"ARCHIVE": archive}, **more}):
        return [problem.id for problem in check_archive()]


class TestE036:
    @pytest.mark.parametrize("path", ["var/lake", "lake", "s3://bucket/lake", "file:///srv/lake"])
    def test_is_a_path_that_is_not_absolute(self, path):
        assert problems({"PATH": path}) == ["outbox.E036"]


class TestE037:
    def test_is_an_archive_that_takes_what_retention_keeps(self):
        assert problems({"PATH": "/srv/lake", "AFTER": timedelta(days=6)}) == ["outbox.E037"]


class TestNothing:
    def test_is_wrong_where_there_is_no_archive(self):
        assert problems(None) == []

    def test_is_wrong_with_an_archive_that_waits_as_long_or_longer(self):
        assert problems({"PATH": "/srv/lake"}) == []
        assert problems({"PATH": "/srv/lake", "AFTER": timedelta(days=7)}) == []
        assert problems({"PATH": "/srv/lake", "AFTER": timedelta(days=2)}, RETENTION=timedelta(days=1)) == []
