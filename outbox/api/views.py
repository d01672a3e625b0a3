"""The check-back endpoint."""

from __future__ import annotations

import logging

from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from outbox.api.authentication import NoSecrets, SignedRequest, read_signers
from outbox.api.parsing import QuestionParser
from outbox.api.refusals import LimitedRefusals, log_limited
from outbox.api.serializers import HalfSerializer
from outbox.api.throttling import CheckBackThrottle
from outbox.check_backs.answer import answer
from outbox.check_backs.ask import PROBE, answer_probe
from outbox.message import Half


class CheckBackView(LimitedRefusals):
    """
    Answer `{topic, message_id, half_id, token, asked, born_at, key}` with `{answer, reason, about}`.

    The answer is COMMIT, ROLLBACK or UNKNOWN; any status other than 200 means UNKNOWN. `about` says whether the row that the
    message is about exists: exists, missing or none.

    `{"probe": true}`, which the doctor sends, is answered with a signature.
    """

    authentication_classes = [SignedRequest]
    permission_classes = []  # the signature is the permission
    throttle_classes = [CheckBackThrottle]
    parser_classes = [QuestionParser]
    renderer_classes = [JSONRenderer]

    def post(self, request: Request) -> Response:
        if request.data == PROBE:
            return Response(answer_probe(read_signers(), str(request.auth), request.headers["webhook-timestamp"]))
        question = HalfSerializer(data=request.data)
        question.is_valid(raise_exception=True)
        given = answer(Half(**question.validated_data), asked_by="endpoint", request_id=str(request.auth))
        return Response({"answer": given.resolution, "reason": given.reason, "about": given.about})

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, NoSecrets):
            log_limited(logging.ERROR, exc.default_code, "%s", exc.why)
        return super().handle_exception(exc)
