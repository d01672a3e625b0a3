"""What docker/compose.yaml starts, started as processes on a real PostgreSQL and a real Redis."""

import json
import urllib.error

import pytest

from tests.docker.machine import Machine, wait_for_letter
from tests.shop.conftest import INVOICE

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def machine(folder, database_url, redis_url):
    """The services that run once have run, and the stylesheets are collected as the Dockerfile does it."""
    there = "postgresql://shop:0123456789abcdef@postgres:5432/shop"
    found = Machine(folder, {there: database_url, "redis://redis:6379/0": redis_url})
    found.services["collect"] = {**found.services["migrate"], "command": ["python", "manage.py", "collectstatic", "--no-input"]}
    found.run("collect")
    found.run("migrate")
    return found


@pytest.fixture(scope="module")
def shop(machine):
    """Web server and consumers run."""
    with machine.running("web", "consumers"):
        yield machine


def order(shop, invoice):
    return shop.post("/shop/orders/", json.dumps({**INVOICE, "invoice": invoice}))


class TestWeb:
    def test_is_ready(self, shop):
        assert json.loads(shop.get("/outbox/health/")) == {"status": "ok", "databases": {"default": "ok"}}

    def test_serves_admin_stylesheets_and_metrics(self, shop):
        assert "Log in" in shop.get("/admin/login/")
        assert "body" in shop.get("/static/admin/css/base.css")
        assert 'outbox_database_up{database="default"} 1.0' in shop.get("/metrics/")

    def test_tells_nothing_of_its_inside(self, shop):
        with pytest.raises(urllib.error.HTTPError) as missing:
            shop.get("/nowhere/")

        assert b"DEBUG" not in missing.value.read()


class TestRelay:
    def test_brings_an_order_to_the_consumers(self, shop, books):
        with shop.running("relay"):
            assert order(shop, "600001") == 201
            wait_for_letter(books, "600001")

        assert not shop.is_healthy("relay")


class TestWorkerAndBeat:
    def test_bring_an_order_to_the_consumers_without_a_relay(self, shop, books):
        with shop.running("worker", "beat"):
            assert order(shop, "600002") == 201
            wait_for_letter(books, "600002")

        assert not shop.is_healthy("worker")
