"""Set-ups with packages that change what Django or psycopg does. Asks the package index for them."""

import subprocess
import sys

import pytest

from tests.setups.conftest import run
from tests.setups.lines import WITH_PACKAGES

pytestmark = [pytest.mark.setups, pytest.mark.timeout(180)]

PACKAGES = ["django-cachalot", "django-tenants", "packaging", "wrapt"]
PACKAGES += [f"opentelemetry-instrumentation{name}" for name in ("", "-dbapi", "-psycopg")]


@pytest.fixture(scope="module")
def folder_of_packages(tmp_path_factory) -> str:
    """Install the packages where nothing else finds them; Django and others are here."""
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES], check=True)
    return str(folder)


@pytest.mark.parametrize("setup", sorted(WITH_PACKAGES - {"django_tenants"}))
def test_package(setup, databases, play, folder_of_packages):
    said = play(setup, databases(f"setup_{setup}"), PYTHONPATH=folder_of_packages)

    assert "handled, replayed" in said


def test_tenants_with_a_shared_outbox(databases, play, folder_of_packages):
    url = databases("setup_django_tenants")
    play("django_tenants", url, "migrate", PYTHONPATH=folder_of_packages)
    run(url, "CREATE SCHEMA north", "INSERT INTO tenants_tenant (schema_name) VALUES ('north')")

    said = play("django_tenants", url, PYTHONPATH=folder_of_packages)

    assert "handled, replayed" in said
