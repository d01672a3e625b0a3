"""The project's addresses."""

from django.contrib import admin
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("shop/", include("project.shop.urls")),
    path("outbox/", include("outbox.api.urls")),
    *staticfiles_urlpatterns(),  # for DEBUG alone
]
