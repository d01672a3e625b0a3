"""
The demo as it is played, then looked at by an operator: in headless Chromium, under a strict content security policy.

Real orders went through the shop's view while relays and consumers were killed; what the admin shows is what came of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest

from project.demo import stage as demo
from project.demo.brokers import Embedded
from project.demo.interrupt import Interrupt
from project.demo.kills import ROUNDS
from project.demo.screen import Screen
from project.shop.orders_file import DAY, read_orders
from tests.browser import trouble

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INVOICES = 60
SCREENSHOTS = Path(os.environ.get("SCREENSHOTS", "var/screenshots"))
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")  # else Playwright's own

# As root Chromium has no sandbox; the rest keeps it from calling home.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking"]


@dataclass
class Shop:
    """The shop after a day: where its admin is, and who may do everything there."""

    address: str
    database_url: str
    password: str
    name: str = "admin"

    def ask(self, query: str) -> Any:
        """Return the first value that a query finds."""
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None, query
        return row[0]


@dataclass
class Visit:
    """A browser's page, and what went wrong on it."""

    page: Page
    shop: Shop
    wrong: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        self.page.goto(self.shop.address + path)
        return self.page

    def photograph(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-browser installs it")
    with playwright.sync_playwright() as running:
        program = CHROMIUM or running.chromium.executable_path
        if not Path(program).exists():
            pytest.skip("there is no Chromium: apt-get install chromium, or name one by CHROMIUM")
        browser = running.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def shop(browser: Browser) -> Iterator[Shop]:
    """Play part of the demo, with kills, and make some trouble; then serve it under a strict policy."""
    options = demo.Options(invoices=read_orders(DAY)[:INVOICES], port=8400)
    with pytest.MonkeyPatch.context() as patch, demo.open_stage(options, Screen(sys.stderr), Interrupt()) as stage:
        patch.setattr(Embedded, "rounds", (ROUNDS[0], ROUNDS[3]))
        stage.play()
        with psycopg.connect(stage.database_url, autocommit=True) as connection:
            trouble.make(connection)
        with demo.listen(8500) as listener:
            command = [sys.executable, "-m", "gunicorn", "project.wsgi", "--bind", f"fd://{listener.fileno()}", "--threads", "4"]
            environment = {"DEBUG": "1", "DJANGO_SETTINGS_MODULE": "tests.browser.settings"}
            stage.processes.start("admin", [*command, "--no-control-socket"], environment, inherits=[listener.fileno()])
            address = "http://{}:{}".format(*listener.getsockname())
            yield Shop(address, stage.database_url, stage.add_admin("admin"))


@pytest.fixture
def visit(browser: Browser, shop: Shop) -> Iterator[Callable[..., Visit]]:
    """Visit the admin, logged in; at the end nothing may have gone wrong, nor come from elsewhere."""
    visits = []
    contexts = []

    def visit(*, scheme: str = "light", locale: str = "en-US", name: str = shop.name, password: str = shop.password) -> Visit:
        context = browser.new_context(color_scheme=scheme, locale=locale, viewport={"width": 1280, "height": 960})
        contexts.append(context)
        one = Visit(context.new_page(), shop)
        visits.append(one)
        _watch(one)
        one.open("/admin/")
        one.page.fill("#id_username", name)
        one.page.fill("#id_password", password)
        one.page.click("[type=submit]")
        one.page.evaluate("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")  # what else the site has
        return one

    yield visit
    for context in contexts:
        context.close()
    assert [wrong for one in visits for wrong in one.wrong] == []


def _watch(visit: Visit) -> None:
    here = urlsplit(visit.shop.address).netloc

    def hear(message: Any) -> None:
        if message.type in ("error", "warning") and "favicon.ico" not in message.location.get("url", ""):
            visit.wrong.append(f"{message.type}: {message.text}")

    def see(request: Any) -> None:
        if urlsplit(request.url).netloc not in (here, ""):
            visit.wrong.append(f"a request to {request.url}")

    def read(response: Any) -> None:
        if response.request.resource_type == "document" and "content-security-policy" not in response.headers:
            visit.wrong.append(f"no policy on {response.url}")
        if response.status >= 400 and "favicon.ico" not in response.url:
            visit.wrong.append(f"{response.status} for {response.url}")

    visit.page.on("console", hear)
    visit.page.on("pageerror", lambda error: visit.wrong.append(str(error)))
    visit.page.on("request", see)
    visit.page.on("response", read)
