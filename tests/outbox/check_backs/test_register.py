import pytest

from outbox.check_backs.register import check_back, resolver_of
from outbox.errors import ConfigurationError
from outbox.message import COMMIT, ROLLBACK


@pytest.mark.usefixtures("resolvers")
class TestCheckBack:
    def test_remembers_the_function_of_a_topic(self):
        @check_back("orders")
        def did_it_commit(half):
            return COMMIT

        assert resolver_of("orders") is did_it_commit
        assert resolver_of("invoices") is None

    def test_refuses_a_second_function_and_names_both(self):
        @check_back("orders")
        def first(half):
            return COMMIT

        with pytest.raises(ConfigurationError, match=r"'orders' has two .*\.first and .*\.second"):

            @check_back("orders")
            def second(half):
                return ROLLBACK

        assert resolver_of("orders") is first

    def test_refuses_to_stand_without_a_topic(self):
        with pytest.raises(ConfigurationError, match=r'@check_back\("orders"\)'):

            @check_back
            def did_it_commit(half):
                return COMMIT
