"""`OUTBOX["PIPELINE"]`: its names and values."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error

from outbox.checks.settings import known_settings
from outbox.conf.reading import read_section
from outbox.errors import ConfigurationError
from outbox.pipeline import conf


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """
    E041: `OUTBOX["PIPELINE"]` holds an unknown name or a wrong value.

    The text names the place, and the nearest known name.
    """
    try:
        read_section(known_settings().pipeline, conf.PipelineSettings, conf.PLACE)
    except ConfigurationError as error:
        hint = "The package's outbox/pipeline/conf.py lists all names, with their types, defaults and units."
        return [Error(str(error), hint=hint, id="outbox.E041")]
    return []


def pipeline_settings() -> conf.PipelineSettings:
    """Return the pipeline's settings; default ones where E041 has reported that they are wrong."""
    try:
        return conf.settings()
    except ConfigurationError:
        return conf.PipelineSettings()
