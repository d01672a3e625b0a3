"""System checks of the pipeline's settings. docs/reference/checks.md is generated from their docstrings."""

from __future__ import annotations

from outbox.pipeline.checks import archive, audit, settings

ALWAYS = (settings.check_settings, archive.check_archive, audit.check_business_rows)
WITH_DATABASES = (audit.check_conditions,)
