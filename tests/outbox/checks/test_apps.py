import pytest
from django.conf import settings as project_settings
from django.core.checks import Error

from outbox.brokers.memory import MemoryBroker
from outbox.pipeline.apps import PipelineAppConfig
from tests.outbox.checks.conftest import BROKERS

EMBEDDED = {"default": {"BACKEND": "outbox.embedded.EmbeddedBroker"}}


class BrokerOfAnApp(MemoryBroker):
    app = "billing.broker"


@pytest.fixture
def without(settings):
    """Remove an app from settings, and the project's apps, which may depend on it."""

    def without(app):
        settings.INSTALLED_APPS = [one for one in project_settings.INSTALLED_APPS if one != app and not one.startswith("project")]

    return without


class TestE042:
    def test_names_the_line_that_a_topics_broker_needs(self, settings, without, found):
        without("outbox.embedded")
        settings.OUTBOX = {"BROKERS": EMBEDDED, "TOPICS": {"orders": {}, "bills": {}}}

        assert found() == [
            Error(
                'OUTBOX["BROKERS"]["default"] needs the tables of the app outbox.embedded, which is not in INSTALLED_APPS. '
                "Its topics are: bills, orders.",
                hint='Add to the settings: INSTALLED_APPS += ["outbox.embedded"]. Then run manage.py migrate.',
                id="outbox.E042",
            )
        ]

    def test_goes_by_what_the_broker_says(self, settings, found):
        settings.OUTBOX = {"BROKERS": {"own": {"BACKEND": f"{__name__}.BrokerOfAnApp"}}, "TOPICS": {"orders": {"BROKER": "own"}}}

        (problem,) = found()

        assert problem.id == "outbox.E042"
        assert 'INSTALLED_APPS += ["billing.broker"]' in problem.hint

    def test_asks_for_nothing_where_no_topic_goes_there(self, settings, without, found):
        without("outbox.embedded")
        settings.OUTBOX = {"BROKERS": {**EMBEDDED, "memory": BROKERS["default"]}, "TOPICS": {"orders": {"BROKER": "memory"}}}

        assert found() == []

    def test_is_content_with_the_apps_own_configuration(self, settings, without, found):
        without("outbox.embedded")
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "outbox.embedded.apps.EmbeddedBrokerConfig"]
        settings.OUTBOX = {"BROKERS": EMBEDDED, "TOPICS": {"orders": {}}}

        assert found() == []


class TestE042OfThePipeline:
    def test_names_the_line_that_the_pipelines_settings_need(self, settings, without, found):
        without("outbox.pipeline")
        settings.OUTBOX = {"BROKERS": BROKERS, "PIPELINE": {"ARCHIVE": {"PATH": "/srv/lake"}}}

        (problem,) = [one for one in found() if one.id == "outbox.E042"]

        text = 'OUTBOX["PIPELINE"] is set, but outbox.pipeline is not in INSTALLED_APPS.'
        assert problem.msg == text
        assert problem.hint.startswith('Add to the settings: INSTALLED_APPS += ["outbox.pipeline"].')

    def test_names_a_config_that_does_not_extend(self, settings, found, monkeypatch):
        monkeypatch.delattr(PipelineAppConfig, "outbox_extension")
        settings.OUTBOX = {"BROKERS": BROKERS, "PIPELINE": {"ARCHIVE": {"PATH": "/srv/lake"}}}

        (problem,) = [one for one in found() if one.id == "outbox.E042"]

        assert problem.msg == 'OUTBOX["PIPELINE"] is set, but outbox.pipeline is installed with another AppConfig.'
        assert problem.hint.startswith("Derive this AppConfig from outbox.pipeline.apps.PipelineAppConfig.")

    def test_asks_for_nothing_where_there_are_no_such_settings(self, settings, without, found):
        without("outbox.pipeline")
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}

        assert found() == []
