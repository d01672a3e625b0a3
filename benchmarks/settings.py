"""The shop's settings with topics of the benchmarks' own, on a broker that keeps nothing and on the embedded one."""

from project.settings import *  # noqa: F403

OUTBOX = {
    "BROKERS": {
        "default": {"BACKEND": "outbox.brokers.embedded.EmbeddedBroker", "OPTIONS": {"DATABASE": "default"}},
        "null": {"BACKEND": "benchmarks.null_broker.NullBroker"},
    },
    "TOPICS": {
        "bench-two-phase": {"TYPE": "transaction"},
        "bench-null-one-phase": {"TYPE": "normal", "BROKER": "null"},
        "bench-null-two-phase": {"TYPE": "transaction", "BROKER": "null"},
        "bench-null-paused": {"TYPE": "normal", "BROKER": "null"},
        **{f"bench-skewed-{n}": {"TYPE": "normal", "BROKER": "null"} for n in range(200)},
    },
    "NUDGE": False,
}
