"""The shop's tables in the admin, read-only: only views and consumers write to them."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from outbox.admin import MessagesAboutMixin
from project.shop import models


class ReadOnly:
    """A read-only admin for users with the view permission."""

    def has_add_permission(self, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


class OrderLines(ReadOnly, admin.TabularInline):
    model = models.OrderLine


@admin.register(models.Order)
class OrderAdmin(MessagesAboutMixin, ReadOnly, admin.ModelAdmin):
    list_display = ["invoice", "customer", "country", "total", "invoiced_at", "placed_at"]
    list_filter = ["country"]
    search_fields = ["invoice", "customer__number"]
    inlines = [OrderLines]


class CancellationLines(ReadOnly, admin.TabularInline):
    model = models.CancellationLine


@admin.register(models.Cancellation)
class CancellationAdmin(MessagesAboutMixin, ReadOnly, admin.ModelAdmin):
    list_display = ["invoice", "customer", "country", "total", "invoiced_at"]
    search_fields = ["invoice", "customer__number"]
    inlines = [CancellationLines]


@admin.register(models.Refusal)
class RefusalAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["what", "invoice", "line", "reason", "refused_at"]
    list_filter = ["what"]
    search_fields = ["invoice"]


@admin.register(models.Customer)
class CustomerAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["number", "country"]
    search_fields = ["number"]


@admin.register(models.Product)
class ProductAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["stock_code", "description"]
    search_fields = ["stock_code", "description"]


@admin.register(models.CartEntry)
class CartEntryAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["invoice", "change", "changed_at"]
    search_fields = ["invoice"]


@admin.register(models.PointsEntry)
class PointsEntryAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["customer_number", "invoice", "points", "booked_at"]
    search_fields = ["customer_number", "invoice"]


@admin.register(models.Shipment)
class ShipmentAdmin(MessagesAboutMixin, ReadOnly, admin.ModelAdmin):
    list_display = ["invoice", "items", "shipped_at"]
    search_fields = ["invoice"]


@admin.register(models.Letter)
class LetterAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["invoice", "text", "written_at"]
    search_fields = ["invoice"]
