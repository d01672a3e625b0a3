"""What is said in the log about requests that were refused. Anybody can send them, so no sender decides how much is written."""

from __future__ import annotations

import json
import logging
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from outbox.logs import LimitedLog, get_logger

logger = get_logger("outbox.api")
limited = LimitedLog(logger)


def log_limited(level: int, cause: str, text: str, *args: object) -> None:
    """Write a line, if its cause has not had one for a minute."""
    limited.log(level, cause, text, *args)


class LimitedRefusals(APIView):
    """A view that writes one line a minute for each cause of refusal, in place of Django's for each request."""

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        answer: Response = super().finalize_response(request, response, *args, **kwargs)
        if answer.status_code >= 400:
            log_refusal(request, answer, by=type(self).__name__)
        return answer


def log_refusal(request: Request, answer: Response, *, by: str) -> None:
    """
    Write the line, if its cause has not had one for a minute.

    Args:
        by: the view. No part of the cause is the sender's.
    """
    given: Any = answer.data if isinstance(answer.data, dict) else {}
    detail = given.get("detail", "")
    log_limited(
        logging.WARNING,
        f"{by} {answer.status_code} {getattr(detail, 'code', '')}",
        "%s answers %s to %s: %s",
        request.path,
        answer.status_code,
        request.META.get("REMOTE_ADDR"),
        detail or json.dumps(given),  # without a detail: fields that are wrong, or databases that are not well
    )
    answer._has_been_logged = True  # type: ignore[attr-defined]  # so Django writes none
