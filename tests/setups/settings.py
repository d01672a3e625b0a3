"""The settings of the small shop in one set-up, which SETUP names; DATABASE_URL and others lead to the databases."""

import os
from collections.abc import Mapping
from typing import Any

import dj_database_url

from tests.setups.lines import LINES

DATABASE = dj_database_url.parse(os.environ["DATABASE_URL"])
DATABASE["HOST"] = DATABASE.setdefault("OPTIONS", {}).pop("host", DATABASE["HOST"])
DATABASES = {"default": DATABASE}

SECRET_KEY = "for-a-shop-of-tests"
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
ROOT_URLCONF = "tests.setups.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.postgres",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "outbox",
    "outbox.embedded",
    "tests.setups.shop",
]
STATIC_URL = "static/"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.locale.LocaleMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
OUTBOX = {"TOPICS": {"orders": {"TYPE": "transaction"}}, "CELERY_WAKEUP": False}

# The set-up's own.
SHOP_DATABASE = "default"
ASGI = False
HAS_API = True
HAS_TASKS = False
ABOUT = ""  # a function from an order to the row that its message is about


def _merged(before: Any, after: Any) -> Any:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return {**before, **{name: _merged(before.get(name), value) for name, value in after.items()}}
    return after


for _name, _value in LINES[os.environ["SETUP"]].items():
    if _name == "WITHOUT_APPS":
        INSTALLED_APPS = [app for app in INSTALLED_APPS if app not in _value]
    elif _name == "WITH_APPS":
        INSTALLED_APPS = [*_value, *INSTALLED_APPS]
    else:
        globals()[_name] = _merged(globals().get(_name), _value)
SHARED_APPS = INSTALLED_APPS
# Another alias is the same database where it says nothing else.
DATABASES = {alias: _merged(DATABASE, database) for alias, database in DATABASES.items()}
