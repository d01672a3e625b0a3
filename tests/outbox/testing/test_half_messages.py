import pytest
from django.db import transaction

from outbox import atomic as outbox_atomic
from outbox import publish
from outbox.models import Batch, CheckBack, State
from tests.outbox.publishing.rows import OrderMade
from tests.outbox.testing.orders import ORDER, commit

pytestmark = pytest.mark.usefixtures("own_topics")


class TestCheckBack:
    def test_answers_from_the_tests_own_transaction_and_records_it(self, outbox):
        commit()
        with outbox.crash("after_decide"):
            outbox.run_until_idle()

        answers = outbox.check_back()

        assert answers == ["COMMIT"]
        assert CheckBack.objects.get().asked_by == "test"
        assert len(outbox.broker.visible("made")) == 1

    def test_is_pending_while_nobody_has_ended_the_half(self, outbox):
        commit()
        with outbox.crash("after_half"):
            outbox.run_until_idle()

        [half] = outbox.pending_check_backs()

        assert (half.topic, half.key) == ("made", "1")
        assert Batch.objects.get().state == State.CLAIMED

    @pytest.mark.django_db(databases=["default", "other"])
    def test_asks_the_database_that_the_message_is_from(self, outbox):
        with outbox_atomic("other"):
            publish(ORDER)
        with outbox.crash("after_decide"):
            outbox.run_until_idle()

        assert outbox.check_back() == ["COMMIT"]
        assert CheckBack.objects.using("other").count() == 1


class TestHalfFirst:
    @pytest.mark.parametrize("is_committing", [pytest.param(False, marks=pytest.mark.django_db), True])
    def test_comes_to_its_handlers(self, request, handled, is_committing):
        if is_committing:
            request.getfixturevalue("transactional_db")
        outbox = request.getfixturevalue("outbox")
        seen = handled(OrderMade)
        with outbox_atomic(half_first=ORDER):
            pass

        outbox.run_until_idle()

        assert seen == [ORDER]
        assert Batch.objects.get().state == State.SENT

    def test_is_rolled_back_with_its_transaction(self, outbox, handled):
        seen = handled(OrderMade)
        with outbox_atomic(half_first=ORDER):
            transaction.set_rollback(True)

        outbox.run_until_idle()

        assert (seen, outbox.pending_check_backs()) == ([], [])

    def test_is_committed_by_the_check_back_where_its_process_died(self, outbox, handled):
        seen = handled(OrderMade)
        with outbox_atomic(half_first=ORDER):
            pass
        with outbox.crash("half_first.after_commit"):
            outbox.run_until_idle()
        assert len(outbox.pending_check_backs()) == 1

        assert outbox.check_back() == ["COMMIT"]
        outbox.run_until_idle()

        assert seen == [ORDER]
