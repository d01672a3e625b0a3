"""Views that go half first. `then` of the request says what they do when they have written."""

from django.contrib.auth.models import Group
from django.db.transaction import non_atomic_requests
from django.http import HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.exceptions import PermissionDenied
from rest_framework.response import Response

from outbox import apublish, transactional
from tests.outbox.half_first.orders import GroupMade, announce


def work(request, message, response=HttpResponse):
    Group.objects.create(pk=message.group_id)
    return answer(request.GET.get("then", "200"), response)


def answer(then, response=HttpResponse):
    if then == "denied":
        raise PermissionDenied
    return response(status=int(then))


@transactional(half_first=announce, rollback_on={409})
def made(request, message):
    return work(request, message)


@non_atomic_requests
@transactional(half_first=announce)
def made_without(request, message):
    return work(request, message)


class Method(View):
    def announce(self, request):
        assert request.method == "GET"
        return announce()

    @transactional(half_first=announce, rollback_on={409})
    def get(self, request, *, message):
        return work(request, message)


class Undecorated(View):
    def get(self, request, message):
        return work(request, message)


@method_decorator(transactional(half_first=announce, rollback_on={409}), name="dispatch")
class Whole(Undecorated):
    pass


@transactional(half_first=announce, rollback_on={409})
@api_view(["GET"])
def api(request, message):
    return work(request, message, Response)


@transactional(half_first=announce, rollback_on={409})
async def asynchronous(request, message):
    await Group.objects.acreate(pk=message.group_id)
    await apublish(GroupMade(group_id=0))
    return answer(request.GET.get("then", "200"))


urlpatterns = [
    path("made/", made),
    path("made-without/", made_without),
    path("method/", Method.as_view()),
    path("whole/", Whole.as_view()),
    path("as-view/", transactional(half_first=announce, rollback_on={409})(Undecorated.as_view())),
    path("api/", api),
    path("async/", asynchronous),
]
