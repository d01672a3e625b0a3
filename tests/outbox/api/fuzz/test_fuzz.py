"""
Twenty thousand requests, from a fixed seed. More by hand:

    FUZZ_REQUESTS=200000 FUZZ_SEED=7 python -m pytest tests/outbox/api/fuzz
"""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
from django.db import connections
from django.urls import reverse

from outbox.check_backs.register import check_back
from outbox.message import Resolution
from outbox.models import CheckBack, MessageRow
from tests.outbox.api.fuzz.requests import Request, body_of, flipped, odd_body, signed, spoil_signature, unsigned
from tests.outbox.api.fuzz.world import FUNCTIONS, World

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "8000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))

REFUSALS = range(400, 500)


class Run:
    """Sends requests, and holds each answer to what is right."""

    def __init__(self):
        self.chance = random.Random(SEED)
        self.world = World(self.chance)
        self.handler = WSGIHandler()
        self.answered = {}  # request id -> the question that it stands for, and what was answered
        self.by_chance = 0  # odd bodies that were questions
        self.times = Counter()  # how often an id came that was signed right
        self.statuses = Counter()
        self.answers = Counter()
        self.wrong = []

    def send(self, request):
        response = self.handler.get_response(WSGIRequest(request.environ()))
        self.statuses[response.status_code] += 1
        return response.status_code, response.content

    def check(self, is_right, *about):
        if not is_right:
            self.wrong.append(about)

    def ask(self):
        """Ask a question as it should be asked."""
        half, right = self.world.question()
        request = signed(f"msg_{len(self.answered)}", body_of(half))
        self._expect(request, half, right)

    def ask_again(self):
        """Replay a question of the last ones."""
        if self.answered:
            request_id = self.chance.choice(list(self.answered)[-50:])
            half, right = self.answered[request_id]
            self._expect(signed(request_id, body_of(half)), half, right)

    def ask_under_an_old_id(self):
        """Ask about another half message under an id that has been given away."""
        if self.answered:
            request_id = self.chance.choice(list(self.answered)[-50:])
            half, _ = self.world.question()
            if half != self.answered[request_id][0]:
                self._expect(signed(request_id, body_of(half)), half, "UNKNOWN", is_new=False)

    def _expect(self, request, half, right, *, is_new=True):
        request_id = request.headers["HTTP_WEBHOOK_ID"]
        status, content = self.send(request)
        self.times[request_id] += 1
        if self.times[request_id] > 10:
            return self.check(status == 429, status, half)
        if is_new:
            self.answered[request_id] = half, right
        answer = json.loads(content)["answer"] if status == 200 else ""
        self.answers[answer] += 1
        return self.check(answer == right, status, content, half, right)

    def send_an_odd_body(self):
        body = odd_body(self.world.known_question()[0], self.chance)
        status, content = self.send(signed(f"odd_{self.statuses.total()}", body))
        self._check_odd(status, content, body)

    def send_a_flipped_body(self):
        half = self.world.known_question()[0]
        body = flipped(half, self.chance)
        status, content = self.send(signed(f"odd_{self.statuses.total()}", body))
        self._check_odd(status, content, body)

    def _check_odd(self, status, content, body):
        """Hold the answer to what does no harm, where the body is a question by chance."""
        if status == 200:
            asked = json.loads(body)
            self.by_chance += 1
            self.check(self.world.allows(asked, json.loads(content)["answer"]), status, content, body)
        else:
            self.check(status in REFUSALS, status, content, body)

    def send_a_wrong_signature(self):
        half, _ = self.world.known_question()
        status, content = self.send(spoil_signature(signed("never", body_of(half)), self.chance))
        self.check(status == 401, status, content)

    def send_anything(self):
        request = unsigned(self.chance)
        status, content = self.send(request)
        self.check(status in REFUSALS, status, content, request)

    def look_at_health(self):
        path = self.chance.choice([reverse("outbox:health"), reverse("outbox:health-outbox")])
        request = Request(b"", {"CONTENT_LENGTH": ""}, self.chance.choice(["GET", "GET", "POST", "HEAD", "BREW"]), path=path)
        status, content = self.send(request)
        self.check(status in (200, 503, 405), status, content)


@pytest.fixture
def run(settings, db):
    settings.OUTBOX = {"CHECK_BACK": {**settings.OUTBOX["CHECK_BACK"], "THROTTLE": "1000000/s"}}
    for topic, says in FUNCTIONS.items():
        check_back(topic)(lambda half, says=says: Resolution(says))
    return Run()


@pytest.mark.slow
@pytest.mark.timeout(60 + REQUESTS // 50)
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestManyRequests:
    def test_get_the_right_answers_and_no_error(self, run):
        few = [run.ask, run.ask_again, run.ask_under_an_old_id, run.send_an_odd_body, run.send_a_flipped_body]
        many = [run.send_a_wrong_signature, run.send_anything, run.look_at_health]
        for _ in range(REQUESTS):
            run.chance.choices([*few, *many], weights=[4, 1, 1, 5, 1, 42, 42, 4])[0]()

        if path := os.environ.get("FUZZ_JSON"):
            Path(path).write_text(json.dumps({"requests": REQUESTS, "statuses": run.statuses, "wrong": len(run.wrong)}))
        assert run.wrong[:5] == []
        assert {"COMMIT", "ROLLBACK", "UNKNOWN"} <= set(run.answers)
        assert max(run.statuses) in (429, 503)
        assert CheckBack.objects.count() == len(run.answered) + run.by_chance
        assert MessageRow.objects.count() == run.world.rows_before + len(run.world.tombstones)
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM outbox_message_default")
            assert cursor.fetchone() == (0,)
