"""System checks of the pipeline's settings. docs/reference/checks.md is generated from their docstrings."""

from __future__ import annotations

from outbox.pipeline.checks import archive, audit, settings  # noqa: F401 (an import registers them)
