"""
The check-back endpoint, where settings name one.

It is sent a signed request without a question. An endpoint that answers 400 took the signature and missed the question:
nothing is asked of the database, and nothing recorded.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator

from outbox import conf
from outbox.check_backs.ask import make_opener, make_signer, signed_request
from outbox.monitoring.doctor.finding import Finding, Level

SUBJECT = "check-back endpoint"
TIMEOUT_SECONDS = 10
AS_IT_SHOULD = 400

MEANINGS = {
    401: "It does not take our signature: give both sides the same SECRETS, and let their clocks agree.",
    404: "There is none at this address: correct URL, or include outbox.api.urls there.",
    503: "It has no SECRETS to verify with.",
}


def examine() -> Iterator[Finding]:
    """Ask the endpoint, without a question."""
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
    if status == AS_IT_SHOULD:
        yield Finding(Level.OK, SUBJECT, f"{settings.url} takes our signature")
    else:
        hint = MEANINGS.get(status, "The log of its web server says why.")
        yield Finding(Level.ERROR, SUBJECT, f"{settings.url} answers {status}", hint)
