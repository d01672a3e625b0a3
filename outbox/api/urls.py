"""Addresses of the HTTP door: include them where the broker finds them."""

from collections.abc import Callable
from typing import Any

from django.db import connections, transaction
from django.urls import path

from outbox.api.health import HealthView, ReadinessView
from outbox.api.views import CheckBackView

app_name = "outbox"


def non_atomic(view: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a view out of the transaction that ATOMIC_REQUESTS opens: none may wait in one, nor fail for want of one."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


urlpatterns = [
    path("check-back/", non_atomic(CheckBackView.as_view()), name="check-back"),
    path("health/", non_atomic(ReadinessView.as_view()), name="health"),
    path("health/outbox/", non_atomic(HealthView.as_view()), name="health-outbox"),
]
