"""
The signed verdict of an audit: its scope, the code's version, the digest of the data, and the result. It can be proved later.

A verdict is signed with HMAC-SHA256 by django.core.signing. The Standard Webhooks signature of check-backs is not suitable,
because it is valid for five minutes, and a verdict may be verified years later.
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
from outbox.pipeline.errors import InvalidVerdict
from outbox.pipeline.spark.jobs import AUDIT_KEY

MIN_KEY_CHARACTERS = 32
SALT = "outbox.audit.verdict"  # part of every signature, so it must never change
HOW_TO_MAKE_A_KEY = """python -c 'import secrets; print(secrets.token_urlsafe(32))'"""


def verdict_of(report: Mapping[str, Any], *, run: int, since: datetime | None, settle_seconds: float) -> dict[str, Any]:
    """Return the verdict of a report: the summary that is signed."""
    kinds = Counter(f"{finding['kind']} at {finding['stage']}" for finding in report["findings"])
    return {
        "run": run,
        "sources": report["sources"],
        "since": None if since is None else since.astimezone(UTC).isoformat(),
        "as_of": report["as_of"],
        "settle_seconds": settle_seconds,
        "counts": report["counts"],
        "foreign": report["foreign"],
        "found": dict(sorted(kinds.items())),
        "is_clean": not kinds,
        "code_version": report["code_version"],
        "data_digest": report["digest"],
        "judged_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def serialize(verdict: Mapping[str, Any]) -> str:
    """Return the text of a verdict in its canonical form, with sorted names."""
    return json.dumps(verdict, sort_keys=True, indent=2, ensure_ascii=False)


def keys() -> list[str]:
    """
    Return the keys in the environment variable `OUTBOX_AUDIT_KEY`, in which they are separated by spaces.

    New verdicts are signed with the first key; signatures of all keys are accepted. Without a key, verdicts are not signed.

    Raises:
        ConfigurationError: a key is too short.
    """
    all_keys = os.environ.get(AUDIT_KEY, "").split()
    if any(len(key) < MIN_KEY_CHARACTERS for key in all_keys):
        raise ConfigurationError(
            f"{AUDIT_KEY} contains a key of fewer than {MIN_KEY_CHARACTERS} characters.", hint=f"Make one: {HOW_TO_MAKE_A_KEY}"
        )
    return all_keys


def sign(text: str) -> str:
    """Return the signature of a serialized verdict; "" without a key. Raises ConfigurationError."""
    all_keys = keys()
    return _signer(all_keys).signature(text) if all_keys else ""


def as_file(text: str, signature: str) -> str:
    """Return the content of the file of a verdict: JSON with verdict and signature."""
    return serialize({"verdict": json.loads(text), "signature": signature}) + "\n"


def verify(content: str) -> dict[str, Any]:
    """
    Verify the content of the file of a verdict, and return the verdict.

    Raises:
        InvalidVerdict: the content is not byte for byte what was signed, or is unsigned.
        ConfigurationError: there is no key to verify with.
    """
    all_keys = keys()
    if not all_keys:
        raise ConfigurationError("There is no key to verify with.", hint=f"Set {AUDIT_KEY} to the key that signed.")
    try:
        parts = json.loads(content)
        verdict, signature = parts["verdict"], parts["signature"]
        text = serialize(verdict)
        if not signature:
            raise InvalidVerdict("This verdict is not signed: there was no key when the audit ran.")
        _signer(all_keys).unsign(f"{text}:{signature}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidVerdict("This file is not a verdict, or is incomplete.") from error
    except BadSignature as error:
        raise InvalidVerdict("The signature does not match: the verdict was changed, or signed with another key.") from error
    if content != as_file(text, signature):
        raise InvalidVerdict("The signature matches, but the file was edited: it is not byte for byte what was written.")
    return dict(verdict)


def _signer(all_keys: list[str]) -> Signer:
    return Signer(key=all_keys[0], fallback_keys=[*all_keys[1:]], salt=SALT, sep=":")
