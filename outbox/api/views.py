"""The check-back endpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC
from typing import IO, Any

from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from outbox.api.authentication import NoSecrets, SignedRequest, read_signers
from outbox.api.refusals import LimitedRefusals, log_limited
from outbox.api.throttling import CheckBackThrottle
from outbox.check_backs.answer import answer
from outbox.check_backs.ask import PROBE, answer_probe
from outbox.message import Half

ID_LENGTH = 255
INT4_MAX = 2**31 - 1


class QuestionParser(BaseParser):
    """
    Parses only unambiguous JSON.

    The body is decoded as UTF-8, whatever the content type says, because the content type is not signed. Duplicate names and the
    constants NaN and Infinity are rejected. All errors are ParseErrors.
    """

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        try:
            return json.loads(stream.read().decode(), object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
        except RecursionError:
            raise ParseError("The JSON is nested too deeply.") from None
        except ValueError as error:
            raise ParseError(f"This is not valid JSON: {error}") from None


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name comes twice")
    return fields


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


class HalfSerializer(serializers.Serializer[dict[str, object]]):
    """A half message about which its broker asks; ids are passed on unchanged."""

    topic = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False)
    message_id = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False)
    half_id = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False)
    token = serializers.CharField(max_length=ID_LENGTH, trim_whitespace=False, allow_blank=True, default="")
    asked = serializers.IntegerField(min_value=1, max_value=INT4_MAX, default=1)
    born_at = serializers.DateTimeField(allow_null=True, default=None, default_timezone=UTC)
    key = serializers.CharField(trim_whitespace=False, allow_blank=True, default="")


class CheckBackView(LimitedRefusals):
    """
    Answer `{topic, message_id, half_id, token, asked, born_at, key}` with `{answer, reason, about}`.

    The answer is COMMIT, ROLLBACK or UNKNOWN; any status other than 200 means UNKNOWN. `about` is "exists", "missing" or "none",
    depending on the row that the message is about.

    `{"probe": true}`, which the doctor sends, is answered with a signature.
    """

    authentication_classes = [SignedRequest]
    permission_classes = []  # a valid signature is sufficient
    throttle_classes = [CheckBackThrottle]
    parser_classes = [QuestionParser]
    renderer_classes = [JSONRenderer]

    def post(self, request: Request) -> Response:
        if request.data == PROBE:
            return Response(answer_probe(read_signers(), str(request.auth), request.headers["webhook-timestamp"]))
        question = HalfSerializer(data=request.data)
        question.is_valid(raise_exception=True)
        result = answer(Half(**question.validated_data), asked_by="endpoint", request_id=str(request.auth))
        return Response({"answer": result.resolution, "reason": result.reason, "about": result.about})

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, NoSecrets):
            log_limited(logging.ERROR, exc.default_code, "%s", exc.reason)
        return super().handle_exception(exc)
