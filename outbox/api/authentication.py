"""
Authentication of check-backs: requests signed with a secret of `OUTBOX["CHECK_BACK"]["SECRETS"]`.

Source: Standard Webhooks specification 1.0, "Verifying webhook authenticity": HMAC-SHA256 over id, time and raw body.
"""

from __future__ import annotations

import time
from datetime import timedelta

from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import RequestDataTooBig
from django.http import UnreadablePostError
from rest_framework import status
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import APIException, AuthenticationFailed, ParseError
from rest_framework.request import Request
from standardwebhooks import Webhook, WebhookVerificationError

from outbox import conf
from outbox.check_backs.ask import make_signer
from outbox.errors import ConfigurationError

HEADERS = ("webhook-id", "webhook-timestamp", "webhook-signature")
BODY_BYTES = 64 * 1024
REQUEST_ID_LENGTH = 255
TOLERANCE = timedelta(minutes=5)  # the largest difference between a signature's time and the server's, as Standard Webhooks says


class NoSecrets(APIException):
    """Raised when signatures cannot be verified, because settings have no secret or an invalid one. `reason` is only logged."""

    status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    default_detail = "This endpoint is not configured."
    default_code = "not_set_up"

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class RequestTooLarge(APIException):
    """Raised when a request is too large for a check-back."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_detail = f"A check-back has at most {BODY_BYTES} bytes."
    default_code = "too_large"


class LengthRequired(APIException):
    """Raised when a request has no Content-Length."""

    status_code = status.HTTP_411_LENGTH_REQUIRED
    default_detail = "The request needs a Content-Length."
    default_code = "no_length"


class SignedRequest(BaseAuthentication):
    """
    Accepts requests that are signed, recent and small; `request.auth` is the id of the request.

    A request that is repeated within the tolerance is also accepted, a few times (throttling.py), because senders that got no
    answer repeat their request. If somebody captures a request and replays it, the answer tells them a fact that does not change,
    and has no effect on the broker, which only reads the response to its own request. All repetitions of a request have one row
    in the table of check-backs (check_backs/answer.py).
    """

    def authenticate(self, request: Request) -> tuple[AnonymousUser, str]:
        signers = read_signers()
        headers = {name: request.headers.get(name, "") for name in HEADERS}
        if not all(headers.values()):
            raise AuthenticationFailed(f"The request is not signed: it needs the headers {', '.join(HEADERS)}.", "not_signed")
        request_id = headers["webhook-id"]
        if len(request_id) > REQUEST_ID_LENGTH:
            raise AuthenticationFailed(f"The webhook-id is longer than {REQUEST_ID_LENGTH} characters.", "odd_id")
        if not (request_id.isascii() and request_id.isprintable()):
            raise AuthenticationFailed("The webhook-id has characters other than printable ASCII.", "odd_id")
        _require_fresh(headers["webhook-timestamp"])
        body = _read_body(request)
        if not any(_is_signed(signer, body, headers) for signer in signers):
            raise AuthenticationFailed("The signature does not match any of this endpoint's secrets.", "wrongly_signed")
        return AnonymousUser(), request_id

    def authenticate_header(self, request: Request) -> str:
        """Return a value for WWW-Authenticate, so that the status is 401 instead of 403."""
        return "Standard-Webhooks"


def read_signers() -> list[Webhook]:
    """Return a signer for each secret of settings; raise NoSecrets if there is none, or one is invalid."""
    try:
        signers = [make_signer(secret) for secret in conf.settings().check_back.secrets]
    except ConfigurationError as error:
        raise NoSecrets(f'OUTBOX["CHECK_BACK"]["SECRETS"] has an invalid secret. {error}') from error
    if not signers:
        raise NoSecrets(
            'A check-back was rejected, because OUTBOX["CHECK_BACK"]["SECRETS"] is empty. Add the secret with which the '
            "broker signs."
        )
    return signers


def _require_fresh(timestamp: str) -> None:
    """Raise unless a timestamp is within the tolerance. The library has the same limit, but its error names no number."""
    tolerance = TOLERANCE.total_seconds()
    try:
        is_fresh = abs(int(time.time()) - int(timestamp)) <= tolerance  # integers, since a float could overflow
    except ValueError:
        raise AuthenticationFailed("The webhook-timestamp is not an integer number of seconds.", "odd_time") from None
    if not is_fresh:
        text = f"The webhook-timestamp differs from this server's by more than {tolerance:g} s."
        raise AuthenticationFailed(text, "stale")


def _read_body(request: Request) -> bytes:
    """Return the raw body. A body that is too large for a check-back, or of unknown length, is not read."""
    length = request.headers.get("content-length", "")
    if not length:
        raise LengthRequired
    if not (length.isascii() and length.isdigit()):
        raise ParseError("The Content-Length is not a number.", "odd_length")
    if int(length[:20]) > BODY_BYTES:
        raise RequestTooLarge
    try:
        body: bytes = request.body
    except RequestDataTooBig as error:  # the project's DATA_UPLOAD_MAX_MEMORY_SIZE is lower than BODY_BYTES
        raise RequestTooLarge from error
    except UnreadablePostError as error:
        raise ParseError("The body is incomplete.", "broke_off") from error
    if len(body) > BODY_BYTES:
        raise RequestTooLarge
    return body


def _is_signed(signer: Webhook, body: bytes, headers: dict[str, str]) -> bool:
    try:
        signer.verify(body, headers, json_parse=False)
    except (WebhookVerificationError, ValueError):  # ValueError: the body is not UTF-8, or the signature is not base64
        return False
    return True
