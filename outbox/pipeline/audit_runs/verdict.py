"""
The verdict of a run: what was judged, by which code, over which data, and what was found; signed, so that it can be shown.

HMAC-SHA256 by django.core.signing, under a salt of our own. The Standard Webhooks signature of the check-back would not do:
it holds for five minutes, and a verdict is looked at years later.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.core.signing import BadSignature, Signer

from outbox.errors import ConfigurationError
from outbox.pipeline.errors import VerdictRefused
from outbox.pipeline.spark.process import AUDIT_KEY

VARIABLE = AUDIT_KEY
SHORTEST_KEY = 32
SALT = "outbox.audit.verdict"  # part of what is signed, no module: verdicts of years ago are verified by it
MAKE_ONE = """python -c 'import secrets; print(secrets.token_urlsafe(32))'"""


def verdict_of(report: Mapping[str, Any], *, run: int, since: datetime | None, settle_seconds: float) -> dict[str, Any]:
    """Sum a report up."""
    found = Counter(f"{one['kind']} at {one['stage']}" for one in report["findings"])
    return {
        "run": run,
        "sources": report["sources"],
        "since": None if since is None else since.astimezone(UTC).isoformat(),
        "as_of": report["as_of"],
        "settle_seconds": settle_seconds,
        "counts": report["counts"],
        "foreign": report["foreign"],
        "found": dict(sorted(found.items())),
        "is_clean": not found,
        "code_version": report["code_version"],
        "data_digest": report["digest"],
        "judged_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write(verdict: Mapping[str, Any]) -> str:
    """Return the one text that stands for a verdict: names sorted, so that nothing can be moved about unnoticed."""
    return json.dumps(verdict, sort_keys=True, indent=2, ensure_ascii=False)


def keys() -> list[str]:
    """
    Return the keys in the environment, separated by blanks there: the first signs, all verify. None: nothing is signed.

    Raises:
        ConfigurationError: one is too short to be a secret.
    """
    found = os.environ.get(VARIABLE, "").split()
    if any(len(key) < SHORTEST_KEY for key in found):
        raise ConfigurationError(f"{VARIABLE} holds a key of fewer than {SHORTEST_KEY} characters. Make one: {MAKE_ONE}")
    return found


def sign(text: str) -> str:
    """Sign what `write` gave; empty where there is no key. Raises ConfigurationError."""
    found = keys()
    return _signer(found).signature(text) if found else ""


def as_file(text: str, signature: str) -> str:
    """Put verdict and signature into one file of JSON."""
    return write({"verdict": json.loads(text), "signature": signature}) + "\n"


def verify(content: str) -> dict[str, Any]:
    """
    Return the verdict in a file, if it is what was signed.

    Raises:
        VerdictRefused: it is not.
        ConfigurationError: there is no key to verify with.
    """
    found = keys()
    if not found:
        raise ConfigurationError(f"There is no key to verify with. Put the one that signed into {VARIABLE}.")
    try:
        parts = json.loads(content)
        verdict, signature = parts["verdict"], parts["signature"]
        text = write(verdict)
        if not signature:
            raise VerdictRefused("This verdict was never signed: the job that wrote it had no key.")
        _signer(found).unsign(f"{text}:{signature}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise VerdictRefused("This is no verdict, or part of it is gone.") from error
    except BadSignature as error:
        raise VerdictRefused("The signature does not fit: the verdict was changed, or another key signed it.") from error
    if content != as_file(text, signature):
        raise VerdictRefused("The verdict is the one that was signed, but the file is not as it was written: it was edited.")
    return dict(verdict)


def _signer(found: list[str]) -> Signer:
    return Signer(key=found[0], fallback_keys=[*found[1:]], salt=SALT, sep=":")
