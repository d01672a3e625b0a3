"""Settings of the benchmarks: topics of their own, on a broker that keeps nothing and on the embedded one."""

from project.settings import DATABASES, DEFAULT_AUTO_FIELD, SECRET_KEY, USE_TZ

__all__ = ["DATABASES", "DEFAULT_AUTO_FIELD", "INSTALLED_APPS", "OUTBOX", "SECRET_KEY", "USE_TZ"]

INSTALLED_APPS = ["outbox", "benchmarks"]

OUTBOX = {
    "BROKERS": {
        "default": {"BACKEND": "outbox.brokers.embedded.EmbeddedBroker", "OPTIONS": {"DATABASE": "default"}},
        "null": {"BACKEND": "benchmarks.null_broker.NullBroker"},
    },
    "TOPICS": {
        "bench-two-phase": {"TYPE": "transaction"},
        "bench-clocked": {"TYPE": "transaction"},
        "bench-null-one-phase": {"TYPE": "normal", "BROKER": "null"},
        "bench-null-two-phase": {"TYPE": "transaction", "BROKER": "null"},
        "bench-null-paused": {"TYPE": "normal", "BROKER": "null"},
        **{f"bench-skewed-{n}": {"TYPE": "normal", "BROKER": "null"} for n in range(200)},
    },
    "NUDGE": False,
}
