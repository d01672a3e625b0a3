from typing import Any

from django.conf import settings

from outbox import RetryPolicy, consumer
from tests.setups.shop.messages import OrderPlaced
from tests.setups.shop.models import Order

IS_REFUSED = 666  # the points that the handler cannot raise, until they are corrected


@consumer(OrderPlaced, group="points", using=settings.SHOP_DATABASE, retry=RetryPolicy(limit=0))
def add_points(message: OrderPlaced, context: Any) -> None:
    order = Order.objects.using(settings.SHOP_DATABASE).get(pk=message.order_id)
    if order.points == IS_REFUSED:
        raise ValueError("The points of this order cannot be raised.")
    order.points += 10
    order.save()
