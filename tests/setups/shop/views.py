from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.utils.module_loading import import_string
from django.views.decorators.csrf import csrf_exempt

from outbox import apublish, publish, transactional
from tests.setups.shop.messages import OrderPlaced
from tests.setups.shop.models import Order


@csrf_exempt
@transactional(using=settings.SHOP_DATABASE)
def place_order(request: HttpRequest) -> JsonResponse:
    order = Order.objects.using(settings.SHOP_DATABASE).create(points=request.POST.get("points", 0))
    publish(OrderPlaced(order_id=order.pk), about=import_string(settings.ABOUT)(order) if settings.ABOUT else order)
    return JsonResponse({"order": order.pk})


@csrf_exempt
@transactional(using=settings.SHOP_DATABASE)
async def place_order_async(request: HttpRequest) -> JsonResponse:
    order = await Order.objects.using(settings.SHOP_DATABASE).acreate(points=request.POST.get("points", 0))
    await apublish(OrderPlaced(order_id=order.pk), about=order)
    return JsonResponse({"order": order.pk})
