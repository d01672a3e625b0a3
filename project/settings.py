"""The shop's settings. Here and in brokers.py the environment is read; docker/compose.yaml sets it."""

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
    raise ImproperlyConfigured("Without DEBUG the shop is open to others: set SECRET_KEY in the environment.")
SECRET_KEY = os.environ.get("SECRET_KEY", "for-a-shop-on-your-own-machine-and-nowhere-else")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "127.0.0.1,localhost").split(",")
# Where browsers come by https: "https://shop.example,..."; forms are refused from elsewhere.
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

# Where `collectstatic` puts the stylesheets, and whence they are served where DEBUG is off.
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

# Commands that need no database work without DATABASE_URL; a connection says what is missing.
if "DATABASE_URL" in os.environ:
    DATABASES = {"default": dj_database_url.config(conn_max_age=60, conn_health_checks=True)}
    # A socket's folder comes as "?host=": dbshell and others look for it in HOST.
    DATABASES["default"]["HOST"] = DATABASES["default"].get("OPTIONS", {}).pop("host", DATABASES["default"]["HOST"])
    # No pooler stands between, so statements may stay prepared: publish() costs a third less.
    DATABASES["default"].setdefault("OPTIONS", {})["prepare_threshold"] = 5
else:
    DATABASES = {"default": {"ENGINE": "project.no_database", "NAME": "no-database"}}

OUTBOX: dict[str, Any] = {
    "BROKERS": {"default": broker(os.environ)},
    "TOPICS": {"orders": {}, "order-cancellations": {}, "shipments": {}},  # of type transaction on brokers with half messages
    "PIPELINE": {
        # For each of these rows a message must have been published, which `make audit` checks.
        "AUDIT": {
            "orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "AT": "placed_at"},
            "cancellations": {"MODEL": "shop.Cancellation", "EXPECTS": "OrderCancelled", "AT": "cancelled_at"},
            "shipments": {"MODEL": "shop.Shipment", "EXPECTS": "OrderShipped", "AT": "shipped_at"},
        },
    },
    "CHECK_BACK": {"URL": os.environ.get("CHECK_BACK_URL", ""), "SECRETS": os.environ.get("CHECK_BACK_SECRETS", "").split()},
}

# One view announces orders half first, which RabbitMQ and Kafka cannot do.
SILENCED_SYSTEM_CHECKS = ["outbox.E035"] if os.environ.get("BROKER") in ("rabbitmq", "kafka") else []

# Without a server: tasks travel as files (project/celery_files.py). With one: its URL.
CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "files://localhost")
if CELERY_BROKER_URL.startswith("files:"):
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "folder": os.environ.get("CELERY_FILES_DIR", str(VAR_DIR / "celery")),
        "polling_interval": 0.02,
    }
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True  # what a task did stands in the database
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_TIME_LIMIT = 120
CELERY_TASK_SOFT_TIME_LIMIT = 90
CELERY_TASK_DEFAULT_QUEUE = "shop"
CELERY_TASK_ROUTES = {"outbox.tasks.*": {"queue": "outbox"}, "outbox.pipeline.tasks.*": {"queue": "outbox"}}
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True
CELERY_WORKER_LOST_WAIT = 1.0  # seconds that a killed child's place stays taken (10 by default), for a result nobody keeps
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = TIME_ZONE
CELERY_BEAT_SCHEDULE = beat_schedule()
