"""Check the configuration of check-backs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Tags
from django.core.checks import Warning as Caution
from django.db import DEFAULT_DB_ALIAS, connections
from django.urls import get_resolver

from outbox.brokers.capabilities import AsksProducers, HalfMessages, NeedsCheckLoop
from outbox.check_backs.ask import make_signer
from outbox.check_backs.loop import make_asker
from outbox.check_backs.rate import read_rate
from outbox.check_backs.register import resolvers
from outbox.checks.decorators import check
from outbox.checks.settings import known_settings, known_topics
from outbox.errors import ConfigurationError
from outbox.message import TopicType

ENDPOINT = "outbox.api.views.CheckBackView"  # by name, because checks do not import the API

View = Callable[..., Any]


@check()
def check_settings() -> Iterable[CheckMessage]:
    """
    E010: `OUTBOX["CHECK_BACK"]["THROTTLE"]` is not a valid rate.

    Write a number and a time: "600/s", "1000/min", "50/10s".

    E011: One of `OUTBOX["CHECK_BACK"]["SECRETS"]` is not a valid secret.

    A secret is `whsec_` followed by at least 32 bytes in base64. Create one: `echo "whsec_$(openssl rand -base64 32)"`.

    E012: `OUTBOX["CHECK_BACK"]["URL"]` cannot be used.

    The URL must begin with http:// or https://, and SECRETS must have a secret to sign with.
    """
    settings = known_settings().check_back
    try:
        read_rate(settings.throttle)
    except ConfigurationError as error:
        yield Error(error.message, hint=f"{error.hint} A time is s, min, h or d, or a whole number of them.", id="outbox.E010")
    is_wrong = False
    for number, secret in enumerate(settings.secrets, start=1):
        try:
            make_signer(secret)
        except ConfigurationError as error:
            text = f'OUTBOX["CHECK_BACK"]["SECRETS"], number {number}: {error.message}'
            hint = f"{error.hint} Both sides need the same secret: one signs, the other verifies."
            yield Error(text, hint=hint, id="outbox.E011")
            is_wrong = True
    if settings.url and not is_wrong:
        try:
            make_asker(DEFAULT_DB_ALIAS)
        except ConfigurationError as error:
            hint = f'{error.hint} Without OUTBOX["CHECK_BACK"]["URL"] ({settings.url!r}), relays answer from the database.'
            yield Error(error.message, hint=hint, id="outbox.E012")


@check()
def check_functions() -> Iterable[CheckMessage]:
    """
    W026: A `@check_back` function is for a topic without check-backs.

    Brokers check back about half messages, which only topics of type transaction have. Correct the topic's name, or remove the
    function.
    """
    transaction_topics = {name for name, topic, _ in known_topics() if topic.type is TopicType.TRANSACTION}
    return [
        Caution(
            f"@check_back({topic!r}) is {function.__module__}.{function.__qualname__}, but that topic has no check-backs.",
            hint=f"Topics of type transaction are: {', '.join(sorted(transaction_topics)) or 'none'}.",
            id="outbox.W026",
        )
        for topic, function in resolvers().items()
        if topic not in transaction_topics
    ]


@check(Tags.urls)
def check_somebody_answers() -> Iterable[CheckMessage]:
    """
    E027: Check-backs of a topic of type transaction would not be answered.

    The topic's broker sends check-backs over HTTP only, and the project's URLs have no check-back endpoint: include
    `outbox.api.urls`.
    """
    for name, topic, broker in () if list(_endpoints()) else known_topics():
        is_asked = topic.type is TopicType.TRANSACTION and HalfMessages.has(broker)
        if is_asked and not (NeedsCheckLoop.has(broker) or AsksProducers.has(broker)):
            yield Error(
                f'OUTBOX["TOPICS"]["{name}"] is of type transaction, but check-backs of its broker {topic.broker!r} would not be '
                "answered.",
                hint='Add path("outbox/", include("outbox.api.urls")) to the project\'s urlpatterns.',
                id="outbox.E027",
            )


@check(Tags.urls)
def check_own_url() -> Iterable[CheckMessage]:
    """
    W054: `OUTBOX["CHECK_BACK"]["URL"]` is set, and the project's URLs have no check-back endpoint.

    Relays would send check-backs to that address and get 404, so half messages would stay hidden. Include `outbox.api.urls`, or
    remove URL: then relays answer check-backs from the database. If another project answers at that address, silence this check.
    """
    url = known_settings().check_back.url
    if url and not list(_endpoints()):
        text = f'OUTBOX["CHECK_BACK"]["URL"] is {url!r}, but the project\'s URLs have no check-back endpoint.'
        hint = 'Add path("outbox/", include("outbox.api.urls")) to the urlpatterns, or remove URL.'
        yield Caution(text, hint=hint, id="outbox.W054")


@check(Tags.urls)
def check_transactions() -> Iterable[CheckMessage]:
    """
    E028: The check-back endpoint runs inside ATOMIC_REQUESTS.

    The endpoint would hold a transaction open while it waits. `include("outbox.api.urls")` excludes the endpoint from
    ATOMIC_REQUESTS; a view of your own needs `transaction.non_atomic_requests(using=...)` for each such database.
    """
    atomic = [alias for alias in connections if connections.settings[alias]["ATOMIC_REQUESTS"]]
    return [
        Error(
            f"The check-back endpoint runs in a transaction of {', '.join(map(repr, affected))}, because of ATOMIC_REQUESTS.",
            hint='Include "outbox.api.urls", or wrap the view: transaction.non_atomic_requests(using=...)(view).',
            id="outbox.E028",
        )
        for view in _endpoints()
        if (affected := [alias for alias in atomic if alias not in getattr(view, "_non_atomic_requests", ())])
    ]


@check(deploy=True)
def check_secrets() -> Iterable[CheckMessage]:
    """
    W029: The check-back endpoint has no secret, so it rejects all requests.

    Set `OUTBOX["CHECK_BACK"]["SECRETS"]`. If no broker uses the endpoint, silence this check. (With `--deploy`.)
    """
    settings = known_settings()
    if settings.brokers and not settings.check_back.secrets and list(_endpoints()):  # without brokers, E001 was reported
        text = 'The check-back endpoint answers all requests with 503, because OUTBOX["CHECK_BACK"]["SECRETS"] is empty.'
        yield Caution(text, hint='Create a secret: echo "whsec_$(openssl rand -base64 32)".', id="outbox.W029")


def _endpoints() -> Iterator[View]:
    """Yield the project's views that answer check-backs."""
    if getattr(django_settings, "ROOT_URLCONF", None):
        for view in _views(get_resolver().url_patterns):
            bases = getattr(getattr(view, "cls", None), "__mro__", ())
            if ENDPOINT in (f"{base.__module__}.{base.__qualname__}" for base in bases):
                yield view


def _views(patterns: Any) -> Iterator[View]:
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            yield from _views(pattern.url_patterns)
        else:
            yield pattern.callback
