import celery
import pytest

from outbox.monitoring.doctor import Level, check_wakeups


@pytest.fixture
def app(settings, monkeypatch):
    settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": True}
    app = celery.Celery("project", broker="memory://", set_as_current=False)
    monkeypatch.setattr(celery, "current_app", app)
    return app


class TestWakeups:
    def test_are_well_when_their_server_can_be_reached(self, app, about):
        ((level, text),) = about(check_wakeups, "wakeups")

        assert level is Level.OK
        assert text.startswith("Celery's server memory://")

    def test_are_named_when_it_cannot(self, app, about):
        app.conf.broker_url = "amqp://127.0.0.1:1//"

        ((level, text),) = about(check_wakeups, "wakeups")

        assert level is Level.WARNING
        assert text.startswith("Celery's server cannot be reached: ConnectionRefusedError")

    def test_are_not_looked_at_where_none_are_sent(self, app, about, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}

        assert about(check_wakeups, "wakeups") == []
