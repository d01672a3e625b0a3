"""Faults for random histories, and what plain Python sets say of them."""

from collections import defaultdict

from hypothesis import strategies as st

COUNT = 30
NUMBERS = st.sets(st.integers(1, COUNT), max_size=4)
GONE = st.fixed_dictionaries(dict.fromkeys(("everywhere", "places", "broker", "cart", "points"), NUMBERS))


def lose(world, gone):
    """Take rows out: frame (or group) -> numbers."""
    world.drop("messages", "places", number=sorted(gone["everywhere"] | gone["places"]))
    world.drop("broker", number=sorted(gone["everywhere"] | gone["broker"]))
    for group in ("cart", "points"):
        world.drop("inbox", number=sorted(gone["everywhere"] | gone[group]), consumer_group=group)
    return world


def by_sets(gone):
    """Return what an audit has to find where these numbers are gone: frame (or group) -> numbers."""
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
