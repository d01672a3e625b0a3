import socket

import pytest

from project.demo.processes import DemoError
from project.demo.stage import PORTS, listen


@pytest.fixture
def free():
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class TestListen:
    def test_takes_the_port_it_is_given(self, free):
        with listen(free) as listener:
            assert listener.getsockname() == ("127.0.0.1", free)

    def test_takes_the_next_where_somebody_listens_already(self, free):
        with listen(free) as first, listen(free) as second:
            assert free < second.getsockname()[1] < free + PORTS
            assert first.getsockname()[1] == free

    def test_says_what_to_do_where_none_is_free(self, monkeypatch, free):
        monkeypatch.setattr("project.demo.stage.PORTS", 1)

        with listen(free), pytest.raises(DemoError, match="Name another: --port N"):
            listen(free)
