from importlib import import_module

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import Tags, register
from django.core.checks import Warning as Caution


def check_place(**kwargs):
    return [] if hasattr(settings, "COPIES") else [Caution("Set COPIES.", id="third_app.W001")]


def check_copies(databases=None, **kwargs):
    return [Caution(f"Database {alias!r} was asked.", id="third_app.W002") for alias in databases or ()]


class ThirdAppConfig(AppConfig):
    name = "tests.third_app"
    outbox_extension = "tests.third_app.extension.ThirdAppExtension"

    def ready(self):
        import_module("tests.third_app.findings")
        register(check_place, "outbox")
        register(check_copies, "outbox", Tags.database)
