"""System check of the names and values in `OUTBOX["PIPELINE"]`."""

from __future__ import annotations

from collections.abc import Iterable

from django.core.checks import CheckMessage, Error

from outbox.checks.decorators import check
from outbox.checks.settings import known_settings
from outbox.conf.reading import read_section
from outbox.errors import ConfigurationError
from outbox.pipeline import conf


@check()
def check_settings() -> Iterable[CheckMessage]:
    """Report under E001 an unknown name or a wrong value in `OUTBOX["PIPELINE"]`."""
    try:
        read_section(known_settings().pipeline, conf.PipelineSettings, conf.PLACE)
    except ConfigurationError as error:
        hint = f"{error.hint} The package's outbox/pipeline/conf.py lists all names, with their types, defaults and units."
        yield Error(error.message, hint=hint.strip(), id="outbox.E001")


def pipeline_settings() -> conf.PipelineSettings:
    """Return the pipeline's settings; the defaults if E001 has reported an error in them."""
    try:
        return conf.settings()
    except ConfigurationError:
        return conf.PipelineSettings()
