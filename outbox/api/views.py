"""The check-back over HTTP: a broker asks, the database answers."""

from __future__ import annotations

from rest_framework.parsers import JSONParser
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from outbox.api.authentication import SignedRequest
from outbox.api.serializers import HalfSerializer
from outbox.api.throttling import CheckBackThrottle
from outbox.check_backs.answer import answer
from outbox.message import Half


class CheckBackView(APIView):
    """
    Answer `{topic, message_id, half_id, token, asked, born_at, key}` with `{answer, reason, about}`.

    The answer is COMMIT, ROLLBACK or UNKNOWN; any other status than 200 means UNKNOWN. `about` says whether the row
    that the message is about is there: exists, missing or none.
    """

    authentication_classes = [SignedRequest]
    permission_classes = []  # the signature is the permission
    throttle_classes = [CheckBackThrottle]
    parser_classes = [JSONParser]
    renderer_classes = [JSONRenderer]

    def post(self, request: Request) -> Response:
        question = HalfSerializer(data=request.data)
        question.is_valid(raise_exception=True)
        given = answer(Half(**question.validated_data), asked_by="endpoint", request_id=str(request.auth))
        return Response({"answer": given.resolution, "reason": given.reason, "about": given.about})
