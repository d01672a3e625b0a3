"""
The set-ups: for each, what its settings have beside or instead of those of `settings.py`.

`WITH_APPS` are installed, too, and `WITHOUT_APPS` are not. What is read from the environment is made by the tests: databases,
replicas, poolers.
"""

import os
from typing import Any

OTHER_DATABASE = {"NAME": os.environ.get("OTHER_NAME")}
REPLICA = {"HOST": os.environ.get("REPLICA_HOST"), "TEST": {"MIRROR": "default"}}
POOLER = {"HOST": os.environ.get("POOLER_HOST"), "PORT": os.environ.get("POOLER_PORT"), "DISABLE_SERVER_SIDE_CURSORS": True}
CELERY = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": "tests.setups.celery_app.app"}}
SERIALIZABLE = {"isolation_level": 4}  # psycopg.IsolationLevel

LINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "use_tz_false": {"USE_TZ": False, "TIME_ZONE": "America/New_York"},
    "atomic_requests": {"DATABASES": {"default": {"ATOMIC_REQUESTS": True}}},
    "replica_router": {
        "DATABASES": {"replica": REPLICA},
        "DATABASE_ROUTERS": ["tests.setups.routers.ReplicaRouter"],
        "SILENCED_SYSTEM_CHECKS": ["outbox.W021"],
    },
    "two_databases": {
        "DATABASES": {"other": OTHER_DATABASE},
        "DATABASE_ROUTERS": ["tests.setups.routers.ShopElsewhere"],
        "SHOP_DATABASE": "other",
        "OUTBOX": {"BROKERS": {"default": {"OPTIONS": {"DATABASE": "other"}}}},
    },
    "assume_role": {"DATABASES": {"default": {"OPTIONS": {"assume_role": "shop_owner"}}}},
    "dml_only": {},
    "pgbouncer": {"DATABASES": {"default": POOLER, "direct": {}}, "OUTBOX": {"DIRECT_DATABASES": {"default": "direct"}}},
    "psycopg_pool": {"DATABASES": {"default": {"OPTIONS": {"pool": {"min_size": 1, "max_size": 4}}}}},
    "server_side_binding": {"DATABASES": {"default": {"OPTIONS": {"server_side_binding": True, "prepare_threshold": 0}}}},
    "serializable": {"DATABASES": {"default": {"OPTIONS": SERIALIZABLE}}, "SILENCED_SYSTEM_CHECKS": ["outbox.W046"]},
    "logical_replication": {},
    "celery_eager": {
        "OUTBOX": {"BROKERS": {"default": {}, "celery": CELERY}},
        "CELERY_BROKER_URL": "memory://",
        "CELERY_TASK_ALWAYS_EAGER": True,
        "CELERY_TASK_EAGER_PROPAGATES": True,
        "HAS_TASKS": True,
    },
    "asgi": {"ASGI": True},
    "no_admin": {
        "WITHOUT_APPS": {"django.contrib.admin", "django.contrib.messages", "django.contrib.sessions"},
        "MIDDLEWARE": [],
        "TEMPLATES": [],
    },
    "no_api": {"HAS_API": False, "WITHOUT_APPS": {"rest_framework"}},
    "custom_user": {"WITH_APPS": ["tests.setups.accounts"], "AUTH_USER_MODEL": "accounts.Account"},
    "mti_key": {"WITH_APPS": ["tests.setups.keys"], "ABOUT": "tests.setups.keys.models.gift_of"},
    "ulid_key": {"WITH_APPS": ["tests.setups.keys"], "ABOUT": "tests.setups.keys.models.parcel_of"},
    "cachalot": {
        "WITH_APPS": ["cachalot"],
        "CACHES": {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        "CACHALOT_UNCACHABLE_APPS": ("outbox", "outbox_embedded", "shop"),  # each process has a cache of its own
    },
    "opentelemetry": {"WITH_APPS": ["tests.setups.agent"]},
    "django_tenants": {
        "WITH_APPS": ["django_tenants", "tests.setups.tenants"],
        "DATABASES": {"default": {"ENGINE": "django_tenants.postgresql_backend"}},
        "DATABASE_ROUTERS": ["django_tenants.routers.TenantSyncRouter"],
        "TENANT_APPS": ["django.contrib.contenttypes"],
        "TENANT_MODEL": "tenants.Tenant",
        "TENANT_DOMAIN_MODEL": "tenants.Domain",
    },
    "german": {"LANGUAGE_CODE": "de", "USE_THOUSAND_SEPARATOR": True, "TIME_ZONE": "Europe/Berlin"},
}

# Those that need packages which the package does not.
WITH_PACKAGES = {"cachalot", "django_tenants", "opentelemetry"}
