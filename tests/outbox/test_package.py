import subprocess
import sys

import pytest

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
            ("publish", "outbox.publish"),
            ("consumer", "outbox.consumer.register"),
            ("check_back", "outbox.check_back.register"),
        ],
    )
    def test_are_not_hidden_by_the_room_of_the_same_name(self, name, room):
        program = ROOM_FIRST.format(name=name, room=room)

        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr

    def test_need_no_django_to_import_the_package(self):
        program = "import sys, outbox; assert not [name for name in sys.modules if name.startswith('django')]"

        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr
