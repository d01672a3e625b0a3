import pytest
from django.apps import apps

from tests.outbox.checks.conftest import BROKERS

OURS = ("outbox", "outbox_embedded", "outbox_pipeline")


class TestW070:
    @pytest.fixture(autouse=True)
    def _cachalot(self, monkeypatch, settings):
        settings.OUTBOX = {"BROKERS": BROKERS}
        is_installed = apps.is_installed
        monkeypatch.setattr(apps, "is_installed", lambda name: name == "cachalot" or is_installed(name))

    def test_finds_tables_that_are_cached(self, found, settings):
        settings.CACHALOT_UNCACHABLE_APPS = ("shop", "outbox")

        (one,) = found()

        assert (one.id, "the tables of outbox_embedded, outbox_pipeline," in one.msg) == ("outbox.W070", True)
        assert one.hint == "Set CACHALOT_UNCACHABLE_APPS = ('shop', 'outbox', 'outbox_embedded', 'outbox_pipeline')."

    @pytest.mark.parametrize("setting", [{"CACHALOT_UNCACHABLE_APPS": OURS}, {"CACHALOT_ENABLED": False}])
    def test_is_quiet_where_none_is(self, found, settings, setting):
        for name, value in setting.items():
            setattr(settings, name, value)

        assert found() == []
