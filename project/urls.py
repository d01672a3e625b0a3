"""The project's URLs."""

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import include, path
from django.views.generic import RedirectView

from outbox.monitoring import metrics

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("shop/", include("project.shop.urls")),
    path("outbox/", include("outbox.api.urls")),
    path("metrics/", metrics.view),  # do not expose this to the internet
    *staticfiles_urlpatterns(),  # they serve files only with DEBUG
]
