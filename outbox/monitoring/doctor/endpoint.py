"""
Check the check-back endpoint, if settings have its URL.

A signed request without a body is sent. An endpoint that answers 400 has accepted the signature and missed the body, so
nothing was read from the database or recorded.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator

from outbox import conf
from outbox.check_backs.ask import make_opener, make_signer, signed_request
from outbox.monitoring.doctor.finding import Finding, Level

SUBJECT = "check-back endpoint"
TIMEOUT_SECONDS = 10
EXPECTED_STATUS = 400

HINTS = {
    401: "It rejects our signature. Use the same SECRETS on both sides, and check their clocks.",
    404: "It does not exist. Correct URL, or include outbox.api.urls there.",
    503: "It has no SECRETS. Set them there, too.",
}


def check() -> Iterator[Finding]:
    """Send the endpoint a signed request without a body."""
    settings = conf.settings().check_back
    if not settings.url:
        return
    request = signed_request(settings.url, make_signer(settings.secrets[0]), "{}")
    try:
        with make_opener().open(request, timeout=TIMEOUT_SECONDS) as response:
            status = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError as error:
        hint = "Start its web server, or correct OUTBOX['CHECK_BACK']['URL']. Half messages stay undecided meanwhile."
        yield Finding(Level.ERROR, SUBJECT, f"{settings.url} cannot be reached: {error}", hint)
        return
    if status == EXPECTED_STATUS:
        yield Finding(Level.OK, SUBJECT, f"{settings.url} accepts our signature")
    else:
        hint = HINTS.get(status, "See the log of its web server.")
        yield Finding(Level.ERROR, SUBJECT, f"{settings.url} answers {status}", hint)
