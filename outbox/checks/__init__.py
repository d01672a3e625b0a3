"""
System checks: problems of settings, message types, consumers and databases that would show with the first message only.

The docstring of each function has its ids; docs/reference/checks.md is generated from these docstrings.
"""

from __future__ import annotations

from django.core.checks import Tags, register

from outbox.checks import apps, caches, celery, check_back, consumers, databases, deployment, messages, servers, settings, times
from outbox.extensions import extensions

TAG = "outbox"  # manage.py check --tag outbox

ALWAYS = (
    settings.check_settings,
    settings.check_topic_names,
    settings.check_brokers,
    settings.check_topic_types,
    apps.check_broker_apps,
    apps.check_pipeline_app,
    caches.check_cachalot,
    times.check_leases,
    times.check_retention,
    times.check_inbox_retention,
    times.check_time_limits,
    messages.check_topics,
    messages.check_keys,
    messages.check_fields,
    messages.check_annotations,
    messages.check_upgrades,
    messages.check_half_first,
    consumers.check_topics,
    consumers.check_databases,
    consumers.check_isolation,
    consumers.check_names,
    databases.check_engine,
    databases.check_autocommit,
    databases.check_direct_databases,
    databases.check_replicas,
    databases.check_business_rows,
    databases.check_prepared_statements,
    check_back.check_settings,
    check_back.check_functions,
    celery.check_beat,
    celery.check_eager,
    celery.check_consumed_groups,
)
WITH_URLS = (check_back.check_transactions, check_back.check_somebody_answers, check_back.check_own_url)
WITH_DATABASES = (
    servers.check_version,
    servers.check_encoding,
    servers.check_tables,
    servers.check_pooler,
    servers.check_direct_databases,
    servers.check_projects,
    servers.check_idle_transactions,
    servers.check_schemas,
)
WHEN_DEPLOYED = (
    check_back.check_secrets,
    deployment.check_durability,
    deployment.check_failpoints,
    deployment.check_running_brokers,
)


def register_checks() -> None:
    """Register all checks, those of extensions too. Called once, by the app's `ready()`."""
    found = extensions()
    for check in (*ALWAYS, *(check for extension in found for check in extension.checks)):
        register(check, TAG)
    for check in WITH_URLS:
        register(check, TAG, Tags.urls)
    for check in (*WITH_DATABASES, *(check for extension in found for check in extension.database_checks)):
        register(check, TAG, Tags.database)
    for check in WHEN_DEPLOYED:
        register(check, TAG, deploy=True)
