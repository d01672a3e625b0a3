"""The shop's settings. They and brokers.py read environment variables, which docker/compose.yaml sets."""

import os
from pathlib import Path
from typing import Any

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from outbox.schedule import beat_schedule
from project.brokers import broker

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = Path(os.environ.get("SHOP_VAR_DIR", BASE_DIR / "var"))

DEBUG = os.environ.get("DEBUG", "1") == "1"
if not DEBUG and "SECRET_KEY" not in os.environ:
    raise ImproperlyConfigured("DEBUG is off, so the shop may be open to others: set SECRET_KEY in the environment.")
SECRET_KEY = os.environ.get("SECRET_KEY", "for-a-shop-on-your-own-machine-and-nowhere-else")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "127.0.0.1,localhost").split(",")
# Origins of the shop if browsers reach it over HTTPS: "https://shop.example,...". Django refuses forms from other origins.
CSRF_TRUSTED_ORIGINS = [origin for origin in os.environ.get("CSRF_TRUSTED_ORIGINS", "").split(",") if origin]
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = bool(CSRF_TRUSTED_ORIGINS)

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.postgres",  # required by Django 6.1 for array columns, which the outbox has
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "outbox",
    "outbox.embedded",
    "outbox.pipeline",
    "project.shop",
    "project.demo",
]

# The folder into which `collectstatic` writes the stylesheets, and from which they are served if DEBUG is off.
STATIC_ROOT = os.environ.get("STATIC_ROOT")

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    *(["whitenoise.middleware.WhiteNoiseMiddleware"] if STATIC_ROOT else []),
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
STATIC_URL = "static/"

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

USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Without DATABASE_URL, commands that need no database work; a connection raises an error that says what to set.
if "DATABASE_URL" in os.environ:
    DATABASES = {"default": dj_database_url.config(conn_max_age=60, conn_health_checks=True)}
    # The folder of a socket is in the URL's query ("?host="), but dbshell and others read it from HOST.
    DATABASES["default"]["HOST"] = DATABASES["default"].get("OPTIONS", {}).pop("host", DATABASES["default"]["HOST"])
    # There is no pooler, so statements may stay prepared, with which publish() takes a third less time.
    DATABASES["default"].setdefault("OPTIONS", {})["prepare_threshold"] = 5
else:
    DATABASES = {"default": {"ENGINE": "project.no_database", "NAME": "no-database"}}

OUTBOX: dict[str, Any] = {
    "BROKERS": {"default": broker(os.environ)},
    "TOPICS": {"orders": {}, "order-cancellations": {}, "shipments": {}},  # of type transaction on brokers with half messages
    "PIPELINE": {
        # `make audit` checks that a message was published for each of these rows.
        "AUDIT": {
            "orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "AT": "placed_at"},
            "cancellations": {"MODEL": "shop.Cancellation", "EXPECTS": "OrderCancelled", "AT": "cancelled_at"},
            "shipments": {"MODEL": "shop.Shipment", "EXPECTS": "OrderShipped", "AT": "shipped_at"},
        },
    },
    "CHECK_BACK": {"URL": os.environ.get("CHECK_BACK_URL", ""), "SECRETS": os.environ.get("CHECK_BACK_SECRETS", "").split()},
}

# One view publishes half first, which needs half messages; RabbitMQ and Kafka have none.
SILENCED_SYSTEM_CHECKS = ["outbox.E035"] if os.environ.get("BROKER") in ("rabbitmq", "kafka") else []

# The URL of Celery's server; without one, tasks are files (project/celery_files.py).
CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "files://localhost")
if CELERY_BROKER_URL.startswith("files:"):
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "folder": os.environ.get("CELERY_FILES_DIR", str(VAR_DIR / "celery")),
        "polling_interval": 0.02,
    }
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True  # the results of the shop's tasks are in the database
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_TIME_LIMIT = 120
CELERY_TASK_SOFT_TIME_LIMIT = 90
CELERY_TASK_DEFAULT_QUEUE = "shop"
CELERY_TASK_ROUTES = {"outbox.tasks.*": {"queue": "outbox"}, "outbox.pipeline.tasks.*": {"queue": "outbox"}}
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True
CELERY_WORKER_LOST_WAIT = 1.0  # seconds to wait for the result of a killed child, which nobody reads (10 by default)
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = TIME_ZONE
CELERY_BEAT_SCHEDULE = beat_schedule()
