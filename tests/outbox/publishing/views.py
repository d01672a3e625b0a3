"""Each shape that @transactional takes. All write a group and publish; then they do what the request's `then` says."""

from contextlib import suppress

from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import IntegrityError
from django.http import HttpResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import PermissionDenied
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from outbox import apublish, publish, transactional
from tests.outbox.publishing.rows import OrderMade


class Broken(Exception):
    """Raised by a view that is told to."""


def work(request, response=HttpResponse):
    """Answer with the status of `then`, or raise what it names."""
    group = Group.objects.create(name="staff")
    publish(OrderMade(order_id=group.pk), about=group)
    return answer(request.GET.get("then", "200"), response)


def answer(then, response=HttpResponse):
    if then == "broken":
        raise Broken
    if then == "denied":
        raise PermissionDenied
    if then == "swallowed":
        with suppress(IntegrityError):
            Group.objects.create(pk=Group.objects.get().pk)
        then = "200"
    return response(status=int(then))


def undecorated(request):
    return work(request)


@transactional
def plain(request):
    return work(request)


@transactional()
def called(request):
    return work(request)


@transactional(rollback_on=range(400, 600))
def strict(request):
    return work(request)


@transactional(rollback_on=lambda response: response.status_code == 409)
def picky(request):
    return work(request)


@transactional(using="other", rollback_on={409})
def elsewhere(request):
    publish(OrderMade(order_id=1))
    return answer(request.GET.get("then", "200"))


class Method(View):
    @transactional
    def get(self, request):
        return work(request)


class Undecorated(View):
    def get(self, request):
        return work(request)


@method_decorator(transactional, name="dispatch")
class Whole(Undecorated):
    pass


@method_decorator(transactional(rollback_on={409}), name="dispatch")
class WholeCalled(Undecorated):
    pass


@api_view(["GET"])
@transactional
def api_outside(request):
    return work(request, Response)


@transactional
@api_view(["GET"])
def api_inside(request):
    return work(request, Response)


class ApiMethod(APIView):
    @transactional
    def get(self, request):
        return work(request, Response)


class Orders(ViewSet):
    @transactional
    def list(self, request):
        return work(request, Response)

    @action(detail=False)
    @transactional
    def under(self, request):
        return work(request, Response)

    @transactional
    @action(detail=False)
    def over(self, request):
        return work(request, Response)


async def awork(request):
    group = await Group.objects.acreate(name="staff")
    await apublish(OrderMade(order_id=group.pk), about=group)
    await sync_to_async(publish)(OrderMade(order_id=0))
    return answer(request.GET.get("then", "200"))


@transactional
async def asynchronous(request):
    return await awork(request)


@transactional(rollback_on={409})
async def asynchronous_picky(request):
    return await awork(request)


class AsyncMethod(View):
    @transactional
    async def get(self, request):
        return await awork(request)


class AsyncUndecorated(View):
    async def get(self, request):
        return await awork(request)


@method_decorator(transactional, name="dispatch")
class AsyncDispatch(AsyncUndecorated):
    pass


class AsyncApi(APIView):
    """What REST framework does not offer."""

    @transactional
    async def get(self, request):
        return await awork(request)


router = SimpleRouter()
router.register("orders", Orders, basename="order")

urlpatterns = [
    path("undecorated/", undecorated),
    path("plain/", plain),
    path("called/", called),
    path("strict/", strict),
    path("picky/", picky),
    path("elsewhere/", elsewhere),
    path("method/", Method.as_view()),
    path("whole/", Whole.as_view()),
    path("whole-called/", WholeCalled.as_view()),
    path("as-view/", transactional(Undecorated.as_view())),
    path("api-outside/", api_outside),
    path("api-inside/", api_inside),
    path("api-method/", ApiMethod.as_view()),
    path("async/", asynchronous),
    path("async-picky/", asynchronous_picky),
    path("async-method/", AsyncMethod.as_view()),
    path("async-as-view/", transactional(AsyncUndecorated.as_view())),
    path("async-dispatch/", AsyncDispatch.as_view()),
    path("api-async/", AsyncApi.as_view()),
    path("", include(router.urls)),
]
