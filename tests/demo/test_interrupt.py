import os
import signal

import pytest

from project.demo.interrupt import Interrupt, Interrupted


@pytest.fixture
def interrupt(signal_handlers):
    return Interrupt()


class TestInterrupt:
    def test_lets_the_demo_go_on_while_nothing_comes(self, interrupt):
        interrupt.check()

    @pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_ends_the_demo_at_the_next_safe_place(self, interrupt, signum, code):
        os.kill(os.getpid(), signum)

        with pytest.raises(Interrupted) as raised:
            interrupt.check()
        assert raised.value.code == code
