"""Addresses of the HTTP door: include them where the broker finds them."""

from django.db import connections, transaction
from django.urls import path

from outbox.api.views import CheckBackView

app_name = "outbox"

check_back = CheckBackView.as_view()
for alias in connections:  # a check-back must not wait in a transaction that ATOMIC_REQUESTS opened
    check_back = transaction.non_atomic_requests(using=alias)(check_back)

urlpatterns = [
    path("check-back/", check_back, name="check-back"),
]
