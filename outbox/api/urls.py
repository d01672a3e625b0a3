"""URLs of the HTTP API, for `include()` in the project's URLconf."""

from django.urls import path

from outbox.api.health import HealthView, ReadinessView
from outbox.api.views import CheckBackView
from outbox.database import outside_transactions

app_name = "outbox"

urlpatterns = [
    path("check-back/", outside_transactions(CheckBackView.as_view()), name="check-back"),
    path("health/", outside_transactions(ReadinessView.as_view()), name="health"),
    path("health/outbox/", outside_transactions(HealthView.as_view()), name="health-outbox"),
]
