"""
System checks: problems of settings, message types, consumers and databases that otherwise appear only with the first message.

Importing the modules adds the checks to Django's registry, where apps that extend the outbox add theirs, too. Each has the tag
`outbox`, `Tags.database` if it queries a database, `Tags.urls` if it reads the URLs, and `deploy=True` if it matters only in
production. The docstring of each function has the ids of its checks; docs/reference/checks.md is generated from the docstrings.
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
