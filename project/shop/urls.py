"""The shop's URLs."""

from django.urls import path

from project.shop import views

app_name = "shop"
urlpatterns = [
    path("cart/", views.fill_cart, name="cart"),
    path("orders/", views.place_order, name="orders"),
    path("orders/half-first/", views.place_order_half_first, name="orders-half-first"),
    path("cancellations/", views.cancel_order, name="cancellations"),
]
