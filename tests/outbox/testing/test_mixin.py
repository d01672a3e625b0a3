import pytest
from django.test import TestCase

from outbox.testing import Outbox, OutboxTestMixin


class TestOutboxTestMixin:
    def test_gives_a_test_the_outbox(self):
        class Test(OutboxTestMixin, TestCase):
            def test(self):
                assert isinstance(self.outbox, Outbox)

        run(Test)

    def test_tells_a_set_up_that_forgot_the_others(self):
        class Test(OutboxTestMixin, TestCase):
            def setUp(self):
                self.outbox.run_until_idle()

            def test(self):
                pass

        with pytest.raises(AssertionError, match=r"Test.setUp\(\) must call super\(\).setUp\(\)"):
            run(Test)


def run(case):
    test = case("test")
    try:
        test.setUp()
        test.test()
    finally:
        test.doCleanups()
