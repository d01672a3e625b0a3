"""The pipeline's admin pages: audits and their findings, archived days."""

from outbox.pipeline.admin import archived, audits

__all__ = ["archived", "audits"]
