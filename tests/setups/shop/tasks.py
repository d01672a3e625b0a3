from celery import shared_task
from django.conf import settings

from outbox.celery import OutboxTask
from tests.setups.shop.models import Order


@shared_task(base=OutboxTask)
def double_points(order_id: int) -> None:
    order = Order.objects.using(settings.SHOP_DATABASE).get(pk=order_id)
    order.points *= 2
    order.save()
