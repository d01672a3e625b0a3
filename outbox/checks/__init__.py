"""
System checks: problems of settings, message types, consumers and databases that would show with the first message only.

Django's registry is their one list, also for apps that extend the outbox. Each has the tag `outbox`, `Tags.database` where it
asks a database, `Tags.urls` where it reads the URLs, and `deploy=True` for what matters in production only. The docstring of each
has its ids; docs/reference/checks.md is generated from them.
"""

from __future__ import annotations

from outbox.checks import (  # noqa: F401 (an import registers them)
    apps,
    celery,
    check_back,
    consumers,
    databases,
    deployment,
    messages,
    servers,
    settings,
    times,
)
