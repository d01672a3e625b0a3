"""Log lines about rejected requests. Since anybody can send such requests, the number of these lines is limited."""

from __future__ import annotations

import json
import logging
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from outbox.logs import get_logger, log_fields

logger = get_logger("outbox.api")


def log_limited(level: int, cause: str, text: str, *args: object) -> None:
    """Write a log line, unless a line with the same cause was written in the last minute (`get_logger` limits lines by cause)."""
    logger.log(level, text, *args, extra=log_fields(cause=cause))


class LimitedRefusals(APIView):
    """A view that logs one line per minute and cause of rejection, instead of Django's line for each request."""

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        answer: Response = super().finalize_response(request, response, *args, **kwargs)
        if answer.status_code >= 400:
            data: Any = answer.data if isinstance(answer.data, dict) else {}
            detail = data.get("detail", "")
            log_limited(
                logging.WARNING,
                f"{type(self).__name__} {answer.status_code} {getattr(detail, 'code', '')}",  # no part comes from the sender
                "%s answers %s to %s: %s",
                request.path,
                answer.status_code,
                request.META.get("REMOTE_ADDR"),
                detail or json.dumps(data),  # errors of fields and the health of databases have no detail
            )
            answer._has_been_logged = True  # type: ignore[attr-defined]  # so that Django does not log the response again
        return answer
