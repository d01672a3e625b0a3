"""The check-back: who answers, and from where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import DEFAULT_DB_ALIAS, connections
from django.urls import get_resolver

from outbox.check_backs.ask import make_signer
from outbox.check_backs.loop import ask_as_set
from outbox.check_backs.rate import read_rate
from outbox.check_backs.register import resolvers
from outbox.checks.settings import known_settings, known_topics
from outbox.errors import ConfigurationError
from outbox.message import TopicType

ENDPOINT = "outbox.api.views.CheckBackView"  # by its name: nobody imports a door

View = Callable[..., Any]


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """
    E010: `OUTBOX["CHECK_BACK"]["THROTTLE"]` cannot be read as a rate.

    Write a number and a time: "600/s", "1000/min", "50/10s".

    E011: One of `OUTBOX["CHECK_BACK"]["SECRETS"]` is no secret.

    It is at least 32 bytes in base64 behind `whsec_`. Make one: `echo "whsec_$(openssl rand -base64 32)"`.

    E012: `OUTBOX["CHECK_BACK"]["URL"]` cannot be asked.

    It begins with http:// or https://, and there is a secret to sign with.
    """
    settings = known_settings().check_back
    found: list[CheckMessage] = []
    try:
        read_rate(settings.throttle)
    except ConfigurationError as error:
        found.append(Error(str(error), hint="A time is s, min, h or d, or a whole number of them.", id="outbox.E010"))
    for place, secret in enumerate(settings.secrets, start=1):
        try:
            make_signer(secret)
        except ConfigurationError as error:
            text = f'OUTBOX["CHECK_BACK"]["SECRETS"], number {place}: {error}'
            found.append(Error(text, hint="Whoever signs and whoever verifies need the same one.", id="outbox.E011"))
    return found or _problems_of_url(settings.url)


def check_functions(**kwargs: Any) -> list[CheckMessage]:
    """
    W026: A `@check_back` function answers for a topic that nobody asks about.

    Brokers ask about half messages, which travel on topics of type transaction. Correct the name, or take it out.
    """
    asked_about = {name for name, topic, _ in known_topics() if topic.type is TopicType.TRANSACTION}
    return [
        Caution(
            f"@check_back({topic!r}) is {function.__module__}.{function.__qualname__}, and nobody asks about that topic.",
            hint=f"Topics of type transaction are {', '.join(sorted(asked_about)) or 'none'}.",
            id="outbox.W026",
        )
        for topic, function in resolvers().items()
        if topic not in asked_about
    ]


def check_somebody_answers(**kwargs: Any) -> list[CheckMessage]:
    """
    E027: A topic of type transaction whose check-backs nobody answers.

    Its broker asks over HTTP alone, and no address of the project leads to the endpoint: include `outbox.api.urls`.
    """
    if list(_endpoints()):
        return []
    return [
        Error(
            f'OUTBOX["TOPICS"]["{name}"] is of type transaction, and nobody answers when its broker {topic.broker!r} asks '
            "about a half message.",
            hint='Add path("outbox/", include("outbox.api.urls")) to the project\'s addresses.',
            id="outbox.E027",
        )
        for name, topic, broker in known_topics()
        if topic.type is TopicType.TRANSACTION
        and broker.supports_half_messages
        and not (broker.needs_check_loop or broker.asks_producers)
    ]


def check_transactions(**kwargs: Any) -> list[CheckMessage]:
    """
    E028: The check-back endpoint runs inside ATOMIC_REQUESTS.

    It would answer from within a transaction of its own, and wait in it. `include("outbox.api.urls")` keeps it out;
    a view of your own needs `transaction.non_atomic_requests(using=...)` for each such database.
    """
    atomic = [alias for alias in connections if connections.settings[alias]["ATOMIC_REQUESTS"]]
    return [
        Error(
            f"The check-back endpoint runs in a transaction of {', '.join(map(repr, caught))}, by ATOMIC_REQUESTS.",
            hint='Include "outbox.api.urls", or wrap the view: transaction.non_atomic_requests(using=...)(view).',
            id="outbox.E028",
        )
        for view in _endpoints()
        if (caught := [alias for alias in atomic if alias not in getattr(view, "_non_atomic_requests", ())])
    ]


def check_secrets(**kwargs: Any) -> list[CheckMessage]:
    """
    W029: The check-back endpoint is there, and has no secret: it answers nobody.

    Give it `OUTBOX["CHECK_BACK"]["SECRETS"]`. Where nobody is to ask it, silence this check. (With `--deploy`.)
    """
    settings = known_settings()
    if not settings.brokers or settings.check_back.secrets or not list(_endpoints()):  # no brokers: E001 has said why
        return []
    return [
        Caution(
            'The check-back endpoint answers 503 to everybody: OUTBOX["CHECK_BACK"]["SECRETS"] is empty.',
            hint="Make a secret: openssl rand -base64 32.",
            id="outbox.W029",
        )
    ]


def _problems_of_url(url: str) -> list[CheckMessage]:
    if not url:
        return []
    try:
        ask_as_set(DEFAULT_DB_ALIAS)
    except ConfigurationError as error:
        hint = f'Without OUTBOX["CHECK_BACK"]["URL"] ({url!r}), relays ask the database themselves.'
        return [Error(str(error), hint=hint, id="outbox.E012")]
    return []


def _endpoints() -> Iterator[View]:
    """Return the project's views that answer check-backs."""
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
