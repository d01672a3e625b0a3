import runpy

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import Client

from project.brokers import broker

SETTINGS = "project/settings.py"


@pytest.fixture
def read(monkeypatch):
    """Read the shop's settings in an environment."""

    def read(**environment):
        for name in ("DEBUG", "SECRET_KEY", "ALLOWED_HOSTS", "CSRF_TRUSTED_ORIGINS", "STATIC_ROOT", "CHECK_BACK_SECRETS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return runpy.run_path(SETTINGS)

    return read


class TestSettings:
    def test_need_a_secret_key_without_debug(self, read):
        with pytest.raises(ImproperlyConfigured, match="SECRET_KEY"):
            read(DEBUG="0")

    def test_take_the_secret_key_of_the_environment(self, read):
        assert read(DEBUG="0", SECRET_KEY="s")["SECRET_KEY"] == "s"

    def test_keep_cookies_to_https_where_browsers_come_by_it(self, read):
        plain, secure = read(), read(CSRF_TRUSTED_ORIGINS="https://shop.example")

        assert (plain["CSRF_TRUSTED_ORIGINS"], plain["SESSION_COOKIE_SECURE"]) == ([], False)
        assert (secure["CSRF_TRUSTED_ORIGINS"], secure["CSRF_COOKIE_SECURE"]) == (["https://shop.example"], True)

    def test_serve_stylesheets_where_they_are_collected(self, read):
        middleware = "whitenoise.middleware.WhiteNoiseMiddleware"

        assert middleware not in read()["MIDDLEWARE"]
        assert read(STATIC_ROOT="/srv/static")["MIDDLEWARE"].index(middleware) == 1

    def test_read_several_secrets(self, read):
        assert read(CHECK_BACK_SECRETS="whsec_a whsec_b")["OUTBOX"]["CHECK_BACK"]["SECRETS"] == ["whsec_a", "whsec_b"]


class TestBroker:
    def test_is_the_embedded_one_by_default(self):
        assert broker({})["BACKEND"] == "outbox.embedded.EmbeddedBroker"

    def test_is_rocketmq_where_the_environment_says_so(self):
        found = broker({"BROKER": "rocketmq", "ROCKETMQ_ENDPOINTS": "mq:8081", "ROCKETMQ_NAME_SERVERS": "a:1,b:2"})

        assert found["OPTIONS"] == {"ENDPOINTS": "mq:8081", "NAME_SERVERS": ["a:1", "b:2"]}

    def test_is_rabbitmq_where_the_environment_says_so(self):
        found = broker(
            {"BROKER": "rabbitmq", "RABBITMQ_NODES": "a:1,b:2", "RABBITMQ_USER": "shop", "RABBITMQ_PASSWORD": "secret"}
        )

        options = found["OPTIONS"]
        assert (options["NODES"], options["USER"], options["PASSWORD"]) == (["a:1", "b:2"], "shop", "secret")

    def test_is_kafka_where_the_environment_says_so(self):
        assert broker({"BROKER": "kafka", "KAFKA_SERVERS": "a:1,b:2"})["OPTIONS"] == {"SERVERS": ["a:1", "b:2"]}

    def test_is_none_that_is_not_there(self):
        with pytest.raises(ImproperlyConfigured, match="BROKER is 'nats'"):
            broker({"BROKER": "nats"})


class TestMetrics:
    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_are_told_by_the_shop(self):
        assert b"outbox_database_up" in Client().get("/metrics/").content
