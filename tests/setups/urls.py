from django.apps import apps
from django.conf import settings
from django.contrib import admin
from django.urls import include, path

from tests.setups.shop import views

urlpatterns = [
    path("orders/", views.place_order_async if settings.ASGI else views.place_order),
    *([path("admin/", admin.site.urls)] if apps.is_installed("django.contrib.admin") else []),
    *([path("outbox/", include("outbox.api.urls"))] if settings.HAS_API else []),
]
