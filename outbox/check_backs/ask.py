"""The client side of check-backs: functions that a broker's check loop or a checker calls to get a half message's resolution."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from uuid import uuid4

from django.db import close_old_connections
from standardwebhooks import Webhook

from outbox.check_backs.answer import answer
from outbox.check_backs.sources import fields_of
from outbox.database import loop_errors
from outbox.database.loop_errors import Loop
from outbox.errors import ConfigurationError
from outbox.logs import error_text, get_logger
from outbox.message import UNKNOWN, Half, Resolution

logger = get_logger("outbox.check_back")

Ask = Callable[[Half], Resolution]
OnOtherAnswer = Callable[[Half, Resolution], None]

ANSWER_BYTES = 64 * 1024
TIMEOUT = timedelta(seconds=10)  # the limit for connecting, and again for the response

ENDPOINT = Loop("check-back endpoint")

# RFC 2104, section 3: a key that is shorter than the hash's output, here SHA-256's, weakens HMAC.
SECRET_BYTES = 32
REMEDIES = {
    400: "Add the URL's host to ALLOWED_HOSTS of the endpoint's project, and see the log of its web server.",
    401: 'Add the first of OUTBOX["CHECK_BACK"]["SECRETS"], which signs, to the SECRETS of the endpoint; or correct the clocks.',
    403: 'Let requests to OUTBOX["CHECK_BACK"]["URL"] pass without a login: they are signed.',
    404: 'Add path("outbox/", include("outbox.api.urls")) to its urlpatterns, or correct OUTBOX["CHECK_BACK"]["URL"].',
    503: 'Set OUTBOX["CHECK_BACK"]["SECRETS"] in the endpoint\'s project, and see the log of its web server.',
} | dict.fromkeys(
    (301, 302, 307, 308), 'Redirects are not followed: set OUTBOX["CHECK_BACK"]["URL"] to the address they lead to.'
)
"""The remedy for each status of a response."""

# The request of the doctor, and the text that the endpoint signs in its reply, which a server without the secret cannot do.
PROBE = {"probe": True}
PROBE_REPLY = "check-back endpoint"

HOW_TO_MAKE_A_SECRET = 'Make one: echo "whsec_$(openssl rand -base64 32)".'


def in_process(alias: str, *, asked_by: str = "broker") -> Ask:
    """
    Return an `ask` that needs no web server, since it reads the database itself.

    Args:
        alias: the database for half messages without a token; tokens name their database.
        asked_by: endpoint, broker, command or admin, for the record of check-backs.
    """

    def ask(half: Half) -> Resolution:
        # A @check_back function uses Django's connections, which a restart of the database may have broken since the last call.
        close_old_connections()
        return answer(half, asked_by=asked_by, using=alias).resolution

    return ask


def log_sent(half: Half, resolution: Resolution) -> None:
    """Log that a broker was sent another answer than the decided one; a process that asks over HTTP cannot record it."""
    logger.info(
        "The broker was sent %s about message %s instead of the decided answer.",
        resolution,
        half.message_id,
        extra=fields_of(half),
    )


def _has_host(url: str) -> bool:
    """Return whether a URL has a host and, if it names a port, a valid port."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and not any(character.isspace() for character in url)
    except ValueError:
        return False


def over_http(url: str, secret: str) -> Ask:
    """
    Return an `ask` that calls a check-back endpoint with requests signed as Standard Webhooks.

    Only a response with status 200 is read for COMMIT and ROLLBACK; everything else means UNKNOWN.

    Args:
        secret: one of the endpoint's `SECRETS`: `whsec_` and base64.

    Raises:
        ConfigurationError: the URL is not http(s), or the secret is not base64.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"The check-back URL {url!r} does not begin with http:// or https://.", hint="Write it in full.")
    if not _has_host(url):
        raise ConfigurationError(f"The check-back URL {url!r} has no valid host and port.", hint="Write it in full.")
    signer = make_signer(secret)
    opener = make_opener()

    def ask(half: Half) -> Resolution:
        try:
            reply = _read(opener, _signed_request(url, signer, _question(half)))
            resolution = Resolution(reply["answer"])
        except Exception as error:
            text = "The check-back endpoint {}. {}".format(*explain(url, error))
            loop_errors.record(ENDPOINT, error, text)
            logger.warning("Message %s: %s", half.message_id, text, extra=fields_of(half))
            return UNKNOWN
        loop_errors.clear(ENDPOINT)
        return resolution

    return ask


def probe(url: str, secret: str) -> None:
    """
    Verify that a check-back endpoint accepts this project's signature. The endpoint does not use its database for this.

    Raises:
        Exception: the endpoint did not accept it; pass the error to `explain`.
    """
    signer = make_signer(secret)
    request = _signed_request(url, signer, json.dumps(PROBE))
    headers = {name: request.get_header(name.capitalize(), "") for name in ("webhook-id", "webhook-timestamp")}
    reply = _read(make_opener(), request)
    signer.verify(PROBE_REPLY, {**headers, "webhook-signature": reply["signature"]}, json_parse=False)


def answer_probe(signers: Iterable[Webhook], request_id: str, timestamp: str) -> dict[str, str]:
    """Return the reply to a probe, which has a signature of each signer."""
    at = datetime.fromtimestamp(int(timestamp), UTC)
    return {"signature": " ".join(signer.sign(request_id, at, PROBE_REPLY) for signer in signers)}


def explain(url: str, error: Exception) -> tuple[str, str]:
    """Return what is wrong with a check-back endpoint that did not answer (its URL and the problem), and a remedy."""
    if isinstance(error, HTTPError):
        problem = f"answered {error.code} {error.reason}"
        remedy = REMEDIES.get(error.code, 'See the log of its web server, or correct OUTBOX["CHECK_BACK"]["URL"].')
    elif isinstance(error, OSError):
        cause = getattr(error, "reason", error)
        problem = f"cannot be reached: {error_text(cause) if isinstance(cause, Exception) else cause}"
        remedy = 'Start its web server, or correct OUTBOX["CHECK_BACK"]["URL"].'
    else:
        problem = f"did not answer as a check-back endpoint does: {error_text(error)}"
        remedy = 'Correct OUTBOX["CHECK_BACK"]["URL"], if that is another page.'
    return f"{url} {problem.rstrip('.')}", remedy


def make_signer(secret: str) -> Webhook:
    """
    Return a signer for a secret.

    Raises:
        ConfigurationError: the secret is not base64, or too short. The text does not contain it.
    """
    encoded = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError as error:
        raise ConfigurationError("A secret is not base64 after 'whsec_'.", hint=HOW_TO_MAKE_A_SECRET) from error
    if len(key) < SECRET_BYTES:
        raise ConfigurationError(
            f"A secret has {len(key)} bytes; at least {SECRET_BYTES} are required.", hint=HOW_TO_MAKE_A_SECRET
        )
    return Webhook(key)


def _read(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> Any:
    """Return the JSON of a response with status 200."""
    with opener.open(request, timeout=TIMEOUT.total_seconds()) as response:
        if response.status != 200:
            raise HTTPError(request.full_url, response.status, response.reason, response.headers, None)
        return json.loads(response.read(ANSWER_BYTES))


def make_opener() -> urllib.request.OpenerDirector:
    """Return an opener that calls the configured URL only: it ignores the environment's proxies and follows no redirects."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _question(half: Half) -> str:
    return json.dumps(
        {
            "topic": half.topic,
            "message_id": half.message_id,
            "half_id": half.half_id,
            "token": half.token,
            "asked": half.asked,
            "born_at": half.born_at and half.born_at.isoformat(),
            "key": half.key,
        }
    )


def _signed_request(url: str, signer: Webhook, body: str) -> urllib.request.Request:
    """Return a request signed as Standard Webhooks with the current time."""
    request_id, now = str(uuid4()), datetime.now(UTC)
    headers = {
        "content-type": "application/json",
        "webhook-id": request_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signer.sign(request_id, now, body),
    }
    return urllib.request.Request(url, body.encode(), headers, method="POST")  # noqa: S310  (the scheme was checked)
