import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections, transaction

from outbox.check_backs.register import check_back
from outbox.message import COMMIT, UNKNOWN, Half
from outbox.models import CheckBack, State
from tests.check_back_secrets import OTHER_SECRET
from tests.factories import BatchFactory, MessageRowFactory
from tests.outbox.api.questions import STRANGE, question_of
from tests.outbox.check_backs.halves import half_of


@pytest.fixture
def sent():
    message = MessageRowFactory(about="auth.group:4711")
    return half_of(BatchFactory(state=State.SENT, message_ids=[message.id], half_ids=["h"]), asked=2)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestCheckBack:
    def test_answers_from_the_database(self, post, sent):
        response = post(question_of(sent))

        assert response.status_code == 200
        assert response.json().keys() == {"answer", "reason", "about"}
        assert (response.json()["answer"], response.json()["about"]) == ("COMMIT", "missing")

    def test_records_the_question_under_its_id(self, post, sent):
        post(question_of(sent), request_id="msg_1")

        row = CheckBack.objects.get()
        assert (row.request_id, row.asked_by, row.asked, row.answer) == ("msg_1", "endpoint", 2, "COMMIT")

    def test_says_unknown_about_an_id_it_does_not_know(self, post, sent):
        source = sent.token.rsplit(":", 3)[0]

        response = post(question_of(sent, token=f"{source}:{2**40}:1:1"))

        assert (response.status_code, response.json()["answer"]) == (200, "UNKNOWN")

    def test_says_unknown_while_the_database_is_away(self, post, sent, monkeypatch):
        question = question_of(sent)

        with monkeypatch.context() as patch:
            for alias in ("default", "other"):
                patch.setitem(connections[alias].settings_dict, "PORT", 1)
            response = post(question)

        assert (response.status_code, response.json()["answer"]) == (200, "UNKNOWN")

    def test_hands_the_whole_half_to_a_function(self, post):
        asked = []

        @check_back("orders")
        def did_it_commit(half):
            asked.append(half)
            return COMMIT

        response = post({**question_of(STRANGE), "key": " 4711 ", "asked": 7})

        assert response.json()["answer"] == "COMMIT"
        assert asked == [Half("orders", "of another producer", "h", asked=7, born_at=STRANGE.born_at, key=" 4711 ")]

    def test_takes_a_time_without_zone_for_utc(self, post, settings):
        settings.TIME_ZONE = "Asia/Shanghai"
        asked = []

        @check_back("orders")
        def did_it_commit(half):
            asked.append(half.born_at)
            return COMMIT

        post(question_of(STRANGE, born_at="2026-01-01T00:00:00"))

        assert asked == [datetime(2026, 1, 1, tzinfo=UTC)]

    @pytest.mark.parametrize("alias", ["default", "other"])
    def test_runs_outside_a_transaction_of_atomic_requests(self, post, monkeypatch, alias):
        monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
        seen = []

        @check_back("orders")
        def did_it_commit(half):
            seen.append(transaction.get_connection(alias).in_atomic_block)
            return UNKNOWN

        post(question_of(STRANGE))

        assert seen == [False]


@pytest.mark.django_db(transaction=True)
class TestCheckBackOfARequestThatComesAgain:
    def test_answers_as_before_and_stays_one_record(self, post, sent):
        request = {"request_id": "msg_1", "at": datetime.now(UTC)}

        first, second = (post(question_of(sent), **request) for _ in range(2))

        assert first.json() == second.json()
        assert CheckBack.objects.count() == 1

    def test_answers_what_is_true_by_then(self, post):
        batch = BatchFactory(state=State.CLAIMED)
        half = half_of(batch, half_id="h")
        before = post(question_of(half), request_id="msg_1")
        type(batch).objects.filter(pk=batch.pk).update(state=State.SENT, half_ids=["h"])

        after = post(question_of(half), request_id="msg_1")

        assert (before.json()["answer"], after.json()["answer"]) == ("UNKNOWN", "COMMIT")
        assert CheckBack.objects.get().answer == "COMMIT"

    def test_says_unknown_when_the_id_comes_with_another_half(self, post, sent):
        post(question_of(STRANGE), request_id="msg_1")

        response = post(question_of(sent), request_id="msg_1")

        assert (response.status_code, response.json()["answer"]) == (200, "UNKNOWN")
        assert CheckBack.objects.get().message_id == STRANGE.message_id

    def test_refuses_a_replay_beyond_the_tolerance(self, post, sent):
        response = post(question_of(sent), at=datetime.now(UTC) - timedelta(minutes=10))

        assert response.status_code == 401
        assert not CheckBack.objects.exists()


@pytest.mark.django_db  # nothing is committed: nobody is answered
class TestCheckBackOfBadInput:
    @pytest.mark.parametrize(
        "body",
        [
            b"{",
            b"[]",
            b'"text"',
            b"null",
            b"{}",
            b"[" * 10_000 + b"]" * 10_000,
            b'{"topic":' * 1000 + b"1" + b"}" * 1000,
            b'{"topic": NaN}',
            b'{"asked": -Infinity}',
            b'{"asked": 1e999}',
            b'{"asked": ' + b"9" * 5000 + b"}",
            b'{"topic": "\\ud800"}',
            b'{"topic": "orders", "topic": "orders"}',
            b'{"asked": 1, "asked": 2}',
            b"\xef\xbb\xbf{}",
            "{}".encode("utf-16"),
            b"\x00",
        ],
    )
    def test_refuses_what_is_no_question(self, post, body):
        response = post(body=body)

        assert response.status_code in (400, 401)  # 401: what is not text cannot be signed
        assert "answer" not in response.json()

    def test_refuses_a_body_without_length(self, post):
        assert post(body=b"").status_code == 411

    def test_refuses_a_name_that_comes_twice(self, post):
        body = json.dumps(question_of(STRANGE)).replace('"token"', '"half_id": "another", "token"').encode()

        response = post(body=body)

        assert (response.status_code, "twice" in response.json()["detail"]) == (400, True)

    @pytest.mark.parametrize("charset", ["utf-16", "zip", "hex", "utf-7", "idna", "unknown", "é"])
    def test_reads_utf_8_whatever_the_content_type_says(self, post, charset):
        response = post(body=b"{}", **{"content-type": f"application/json; charset={charset}"})

        assert response.status_code == 400
        assert set(response.json()) == {"topic", "message_id", "half_id"}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("topic", ""),
            ("topic", None),
            ("topic", "x" * 256),
            ("message_id", ""),
            ("message_id", "\0"),
            ("message_id", {}),
            ("half_id", ""),
            ("half_id", "\ud800"),
            ("token", None),
            ("token", "x" * 256),
            ("asked", 0),
            ("asked", 2**31),
            ("asked", 10**4000),
            ("asked", 1e300),
            ("asked", "twice"),
            ("born_at", "yesterday"),
            ("born_at", 17),
            ("born_at", "0001-01-01T00:00:00+23:00"),
            ("born_at", "9999-12-31T23:59:59-23:00"),
            ("key", []),
        ],
    )
    def test_names_the_field_that_is_wrong(self, post, field, value):
        response = post(question_of(STRANGE, **{field: value}))

        assert response.status_code == 400
        assert response.json().keys() == {field}

    def test_takes_json_alone(self, post):
        response = post(body=b"topic=orders", content_type="application/x-www-form-urlencoded")

        assert response.status_code == 415

    def test_is_asked_by_post_alone(self, client):
        assert client.get("/outbox/check-back/").status_code in (401, 405)


@pytest.mark.django_db(transaction=True)
class TestTheThrottle:
    def test_answers_only_so_many_in_a_time(self, post, settings):
        settings.OUTBOX = {"CHECK_BACK": {**settings.OUTBOX["CHECK_BACK"], "THROTTLE": "2/h"}}

        answers = [post(question_of(STRANGE)).status_code for _ in range(3)]

        assert answers == [200, 200, 429]

    def test_lets_nobody_else_use_the_share_up(self, post, settings):
        settings.OUTBOX = {"CHECK_BACK": {**settings.OUTBOX["CHECK_BACK"], "THROTTLE": "1/h"}}
        post(question_of(STRANGE), secret=OTHER_SECRET)

        assert post(question_of(STRANGE)).status_code == 200


@pytest.mark.django_db(transaction=True)
class TestARequestThatComesAgain:
    @pytest.fixture(autouse=True)
    def _two_answers(self, settings):
        settings.OUTBOX = {"CHECK_BACK": {**settings.OUTBOX["CHECK_BACK"], "THROTTLE": "2/h"}}

    def test_leaves_the_share_to_others(self, post):
        captured = {"request_id": "msg_1", "at": datetime.now(UTC)}
        for _ in range(30):
            post(question_of(STRANGE), **captured)

        assert post(question_of(STRANGE)).status_code == 200

    def test_is_answered_ten_times(self, post):
        captured = {"request_id": "msg_1", "at": datetime.now(UTC)}

        answers = [post(question_of(STRANGE), **captured) for _ in range(12)]

        assert [one.status_code for one in answers] == [200] * 10 + [429] * 2
        assert int(answers[-1].headers["Retry-After"]) == 600

    def test_counts_anew_where_it_was_refused(self, post):
        for _ in range(2):
            post(question_of(STRANGE))

        assert [post(question_of(STRANGE), request_id="msg_1").status_code for _ in range(3)] == [429] * 3
