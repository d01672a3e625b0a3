from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.db import connections
from django.test import override_settings

from outbox.api.throttling import CheckBackThrottle, count_request, forget_request
from outbox.errors import ConfigurationError
from project.servers.redis import Redis
from tests.outbox.api.questions import STRANGE, question_of


class TestCheckBackThrottle:
    @pytest.mark.parametrize(
        ("rate", "means"),
        [("600/s", (600, 1)), ("50/10s", (50, 10)), ("100/min", (100, 60)), ("7/2hours", (7, 7200)), ("1/day", (1, 86400))],
    )
    def test_reads_its_rate_from_settings(self, settings, rate, means):
        settings.OUTBOX = {"CHECK_BACK": {"THROTTLE": rate}}

        throttle = CheckBackThrottle()

        assert (throttle.num_requests, throttle.duration) == means

    @pytest.mark.parametrize("rate", ["", "600", "600/", "many/s", "600/year", "6.5/s", "-1/s", "600/0s"])
    def test_says_how_a_rate_is_written(self, settings, rate):
        settings.OUTBOX = {"CHECK_BACK": {"THROTTLE": rate}}

        with pytest.raises(ConfigurationError, match="600/s"):
            CheckBackThrottle()


@pytest.mark.redis
@pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server: apt-get install redis-server.")
@pytest.mark.django_db(transaction=True)
class TestOnRedis:
    """All processes share one count; threads stand for them here, each with its own connection to Redis."""

    @pytest.fixture
    def server(self, tmp_path):
        with Redis(tmp_path) as server:
            cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": server.url}
            with override_settings(CACHES={"default": cache}):
                yield server

    @pytest.fixture
    def post_elsewhere(self, post, server):
        def post_and_leave(**options):
            try:
                return post(**options)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as elsewhere:
            yield lambda **options: elsewhere.submit(post_and_leave, **options).result()

    def test_counts_requests_of_all_processes(self, settings, post, post_elsewhere):
        settings.OUTBOX = {"CHECK_BACK": {**settings.OUTBOX["CHECK_BACK"], "THROTTLE": "2/h"}}

        answers = [send(question=question_of(STRANGE)).status_code for send in (post, post_elsewhere, post, post_elsewhere)]

        assert answers == [200, 200, 429, 429]

    def test_answers_a_replayed_request_ten_times_in_all(self, post, post_elsewhere):
        answers = [send(question=question_of(STRANGE), request_id="msg_1").status_code for send in [post, post_elsewhere] * 6]

        assert answers == [200] * 10 + [429] * 2

    def test_forgets_a_request_when_its_signature_is_no_longer_valid(self, server):
        count_request("msg_1")

        with redis.Redis.from_url(server.url) as client:
            [left] = [client.ttl(key) for key in client.scan_iter()]
        assert 590 < left <= 600

    def test_answers_while_redis_is_away(self, post, server, caplog):
        assert post(question_of(STRANGE)).status_code == 200
        server.kill()

        answers = [post(question_of(STRANGE), request_id="msg_1").status_code for _ in range(12)]

        assert answers == [200] * 12
        assert caplog.text.count("Check-backs are not limited, because the default cache cannot be used: ConnectionError") == 1


class TestCountRequest:
    def test_counts_each_request(self):
        assert [count_request(name) for name in ("a", "b", "a", "a")] == [1, 1, 2, 3]

    def test_begins_anew_with_a_forgotten_request(self):
        count_request("a")
        forget_request("a")

        assert count_request("a") == 1

    def test_counts_nothing_where_the_cache_keeps_nothing(self, settings):
        settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}

        assert [count_request("a"), count_request("a")] == [1, 1]
