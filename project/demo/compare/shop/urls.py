"""The URLs of the shop of the comparison."""

from django.urls import path

from project.demo.compare.shop import views
from project.shop.views import fill_cart

urlpatterns = [
    path("shop/cart/", fill_cart),
    path("shop/orders/", views.place_order),
    path("shop/cancellations/", views.cancel_order),
]
