"""The shop's books in the admin."""

from django.contrib import admin

from project.shop import models


class OrderLines(admin.TabularInline):
    model = models.OrderLine
    extra = 0
    raw_id_fields = ["product"]


@admin.register(models.Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["invoice", "customer", "country", "total", "invoiced_at", "placed_at"]
    list_filter = ["country"]
    search_fields = ["invoice", "customer__number"]
    raw_id_fields = ["customer"]
    inlines = [OrderLines]


class CancellationLines(admin.TabularInline):
    model = models.CancellationLine
    extra = 0
    raw_id_fields = ["product", "order_line"]


@admin.register(models.Cancellation)
class CancellationAdmin(admin.ModelAdmin):
    list_display = ["invoice", "customer", "country", "total", "invoiced_at"]
    search_fields = ["invoice", "customer__number"]
    raw_id_fields = ["customer"]
    inlines = [CancellationLines]


@admin.register(models.Refusal)
class RefusalAdmin(admin.ModelAdmin):
    list_display = ["what", "invoice", "line", "reason", "refused_at"]
    list_filter = ["what", "reason"]
    search_fields = ["invoice"]


@admin.register(models.Customer)
class CustomerAdmin(admin.ModelAdmin):
    list_display = ["number", "country"]
    search_fields = ["number"]


@admin.register(models.Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["stock_code", "description"]
    search_fields = ["stock_code", "description"]


@admin.register(models.CartEntry)
class CartEntryAdmin(admin.ModelAdmin):
    list_display = ["invoice", "change", "changed_at"]
    search_fields = ["invoice"]


@admin.register(models.PointsEntry)
class PointsEntryAdmin(admin.ModelAdmin):
    list_display = ["customer_number", "invoice", "points", "booked_at"]
    search_fields = ["customer_number", "invoice"]


@admin.register(models.Shipment)
class ShipmentAdmin(admin.ModelAdmin):
    list_display = ["invoice", "items", "shipped_at"]
    search_fields = ["invoice"]


@admin.register(models.Letter)
class LetterAdmin(admin.ModelAdmin):
    list_display = ["invoice", "text", "written_at"]
    search_fields = ["invoice"]
