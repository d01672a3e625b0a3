import copy
import inspect
import json
import pickle
import pkgutil
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec

import pytest
from celery import Celery
from celery.backends.base import Backend
from django.utils.translation import gettext_lazy

import outbox
from outbox import errors
from outbox.errors import ConfigurationError, OutboxError, Reject, RetryLater, TimeLimitExceeded
from outbox.pipeline import errors as pipeline_errors

# What is raised to somebody who never sees it, or by another rule.
OF_ROOMS = ("outbox.admin", "outbox.api", "outbox.brokers", "outbox.migrations", "outbox.pipeline.spark", "outbox.testing")
# What this Django cannot import.
OF_LATER = () if find_spec("django.tasks") else ("outbox.celery.django_tasks",)

# OutboxError first; the two modules are the page of errors.
KINDS = [
    kind
    for module in (errors, pipeline_errors)
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, OutboxError) and kind.__module__ == module.__name__
]
FAMILY = [kind("It is so.", "Do that.") for kind in KINDS if kind is not RetryLater]
OTHERS = [
    RetryLater(300, "The bank is closed."),
    RetryLater(timedelta(seconds=0.5)),
    TimeLimitExceeded("It took too long."),
]


class NoSuchOrder(Reject):
    """An error of a user's, which does not call the base."""

    def __init__(self, order):
        self.order = order


class Closed(RetryLater):
    """The same, of an error that names a time."""

    def __init__(self, place):
        self.place = place


class Declined(Reject):
    """An error of a user's, which has a `message` of its own."""

    def __init__(self, message):
        self.message = message
        super().__init__("The card was declined.", "Ask for another.")


each_error = pytest.mark.parametrize("error", [*FAMILY, *OTHERS], ids=lambda error: type(error).__name__)


def told(error):
    return type(error), str(error), *(getattr(error, name, None) for name in ("message", "hint", "after"))


class TestOutboxError:
    @pytest.mark.parametrize("error", FAMILY, ids=lambda error: type(error).__name__)
    def test_has_a_message_and_a_hint_and_its_text_is_both(self, error):
        assert (error.message, error.hint, str(error)) == ("It is so.", "Do that.", "It is so. Do that.")

    def test_has_an_empty_hint_where_none_is_given(self):
        error = ConfigurationError("It is so.")

        assert (error.message, error.hint, str(error)) == ("It is so.", "", "It is so.")

    def test_takes_nothing_or_another_error_from_a_handler(self):
        assert [str(Reject()), str(Reject(KeyError("size")))] == ["", "'size'"]

    def test_takes_as_much_as_exceptions_take(self):
        assert str(Reject("a", "b", "c")) == "('a', 'b', 'c')"

    def test_has_the_texts_of_a_subclass_that_does_not_call_it(self):
        error = NoSuchOrder(4711)

        assert (error.message, error.hint, str(error)) == ("4711", "", "4711")

    def test_waits_a_minute_for_a_subclass_that_gives_no_time(self):
        error = Closed("bank")

        assert (error.after, str(error)) == (timedelta(minutes=1), "to be retried after 0:01:00")

    def test_takes_a_hint_that_is_translated_when_it_is_shown(self):
        assert str(Reject("It is so.", gettext_lazy("Do that."))) == "It is so. Do that."

    def test_leaves_a_subclass_an_attribute_of_that_name(self):
        error = Declined({"order": 4711})

        assert (error.message, str(error)) == ({"order": 4711}, "The card was declined. Ask for another.")

    @each_error
    def test_is_the_same_after_it_was_pickled(self, error):
        assert told(pickle.loads(pickle.dumps(error))) == told(error)  # noqa: S301

    @each_error
    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
    def test_is_the_same_when_copied(self, error, make):
        assert told(make(error)) == told(error)

    @pytest.mark.parametrize("error", [*FAMILY, *OTHERS[:2]], ids=lambda error: type(error).__name__)
    def test_is_the_same_in_a_task_result_that_celery_stores_as_json(self, error):
        backend = Backend(Celery("shop", set_as_current=False), serializer="json")

        stored = json.loads(json.dumps(backend.prepare_exception(error)))

        assert told(backend.exception_to_python(stored)) == told(error)


class TestTheErrors:
    def test_are_one_family(self):
        strangers = []
        for module in pkgutil.walk_packages(outbox.__path__, "outbox."):
            if module.name.startswith((*OF_ROOMS, *OF_LATER)):
                continue
            for name, kind in inspect.getmembers(import_module(module.name), inspect.isclass):
                is_ours = kind.__module__ == module.name and issubclass(kind, Exception) and not name.startswith("_")
                if is_ours and not issubclass(kind, OutboxError):
                    strangers.append(f"{module.name}.{name}")

        assert strangers == []

    def test_stand_in_one_file_of_their_app(self):
        def below(kind):
            return {kind, *(one for child in kind.__subclasses__() for one in below(child))}

        ours = {kind for kind in below(OutboxError) if kind.__module__.startswith("outbox.")}

        assert ours == set(KINDS)

    @pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.__name__)
    def test_say_when_they_are_raised(self, kind):
        assert kind.__doc__.startswith("Raised ")
        assert kind.__doc__.rstrip().endswith(".")
