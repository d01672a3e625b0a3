import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.core.cache import cache
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse
from standardwebhooks import Webhook

from outbox.check_backs import register, sources
from tests.check_back_secrets import SECRET

Post = Callable[..., HttpResponse]


@pytest.fixture(autouse=True)
def _clean_slate(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings.OUTBOX = {"CHECK_BACK": {"SECRETS": [SECRET]}}
    monkeypatch.setattr(register, "registered", {})
    monkeypatch.setattr(sources, "_aliases", {})
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def post() -> Post:
    """Post a question as a broker does; each part of the request can be another."""

    def post(
        question: Any = None,
        *,
        body: bytes | None = None,
        secret: str = SECRET,
        at: datetime | None = None,
        request_id: str | None = None,
        content_type: str = "application/json",
        **headers: str,
    ) -> HttpResponse:
        body = json.dumps(question).encode() if body is None else body
        request_id, at = request_id or str(uuid4()), at or datetime.now(UTC)
        signed = {
            "webhook-id": request_id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": Webhook(secret).sign(request_id, at, body.decode(errors="replace")),
        }
        return Client(enforce_csrf_checks=True).post(
            reverse("outbox:check-back"), body, content_type=content_type, headers=signed | headers
        )

    return post
