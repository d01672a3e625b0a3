import subprocess
import sys

import pytest
from django.utils.module_loading import import_string

import outbox

pytestmark = pytest.mark.slow

ROOM_FIRST = """
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["outbox"])
django.setup()
import {room}
from outbox import {name}
assert callable({name}), {name}
"""


class TestPublicNames:
    @pytest.mark.parametrize(
        ("name", "room"),
        [
            ("publish", "outbox.publishing.functions"),
            ("consumer", "outbox.consuming.register"),
            ("check_back", "outbox.check_backs.register"),
        ],
    )
    def test_are_functions_whatever_was_imported_before(self, name, room):
        program = ROOM_FIRST.format(name=name, room=room)

        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr

    @pytest.mark.parametrize("name", ["outbox.publish", "outbox.celery.OutboxTask", "outbox.models.MessageRow"])
    def test_say_that_the_app_is_not_installed(self, name):
        room, _, name = name.rpartition(".")
        program = (
            "import django; from django.conf import settings; settings.configure(INSTALLED_APPS=[]); django.setup()\n"
            f"from {room} import {name}"
        )

        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert outcome.stderr.splitlines()[-1] == (
            "outbox.errors.ConfigurationError: The project uses outbox, which is not in INSTALLED_APPS. Add to the settings: "
            'INSTALLED_APPS += ["outbox"]. Then run manage.py migrate.'
        )
        assert "RuntimeError" not in outcome.stderr

    @pytest.mark.parametrize("name", outbox._MOVED)
    def test_of_the_first_release_say_what_they_are_called(self, name):
        with pytest.raises(ImportError, match=f"outbox.{name} has been called outbox.") as moved:
            getattr(outbox, name)

        assert import_string(str(moved.value).split()[-3])

    def test_need_nothing_of_others_to_import_the_package(self):
        program = (
            "import sys; before = set(sys.modules); import outbox; "
            "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
        )

        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert outcome.stdout == "['outbox']\n", outcome.stderr

    def test_need_no_broker_and_no_models_for_a_message(self):
        program = (
            "import sys; from outbox import Message, Reject, RetryPolicy; "
            "print([name for name in sys.modules "
            "if name.startswith(('outbox.brokers', 'outbox.models', 'kombu', 'grpc', 'celery'))])"
        )

        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert outcome.stdout == "[]\n", outcome.stderr
