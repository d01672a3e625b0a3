"""Random histories with faults, audited by Spark and by plain Python sets."""

from collections import defaultdict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.outbox.pipeline.worlds import World, said

COUNT = 30
NUMBERS = st.sets(st.integers(1, COUNT), max_size=4)


def by_sets(gone):
    """Say what an audit has to find where these numbers are gone: frame (or group) -> numbers."""
    never = gone["everywhere"]
    places = set(range(1, COUNT + 1)) - never - gone["places"]
    stored = set(range(1, COUNT + 1)) - never - gone["broker"]
    found = defaultdict(set)
    arrived = set()
    for group in ("cart", "points"):
        handled = set(range(1, COUNT + 1)) - never - gone[group]
        found["lost", "inbox", group] = stored - handled
        found["orphan", "inbox", group] = handled - stored - places
        arrived |= handled
    found["lost", "outbox", ""] = set(range(1, COUNT + 1)) - places - stored - arrived
    found["lost", "broker", ""] = places - stored
    found["orphan", "broker", ""] = stored - places
    return {what: numbers for what, numbers in found.items() if numbers}


class TestSpark:
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(gone=st.fixed_dictionaries(dict.fromkeys(("everywhere", "places", "broker", "cart", "points"), NUMBERS)))
    def test_finds_what_plain_sets_find(self, spark, gone):
        world = World().set(business=[]).add(COUNT)
        world.drop("messages", "places", number=sorted(gone["everywhere"] | gone["places"]))
        world.drop("broker", number=sorted(gone["everywhere"] | gone["broker"]))
        for group in ("cart", "points"):
            world.drop("inbox", number=sorted(gone["everywhere"] | gone[group]), consumer_group=group)

        found = defaultdict(set)
        for kind, stage, group, first, last, _ in said(world.audit(spark)):
            found[kind, stage, group].update(range(first, last + 1))

        assert dict(found) == by_sets(gone)
