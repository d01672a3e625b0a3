"""The project's addresses."""

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("shop/", include("project.shop.urls")),
    path("outbox/", include("outbox.api.urls")),
    *staticfiles_urlpatterns(),  # for DEBUG alone
]
