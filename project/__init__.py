"""A small web shop that shows the outbox at work: `make demo`, `make serve`."""

from project.celery import app as celery_app

__all__ = ["celery_app"]
