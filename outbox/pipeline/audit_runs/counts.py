"""What an audit counted for consumer groups, taken from the names of its counts."""

from __future__ import annotations

from collections.abc import Mapping

OF_GROUPS = {
    "handled": "handled by ",
    "dead letters": "dead letters of ",
    "discarded": "discarded by operators for ",
    "unread": "unread by ",
}
"""Head -> how the name of a count begins, before that of the group; as `spark.transforms.judge` makes them."""


def by_group(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return group -> head -> count, of the counts of a topic. Runs of older versions lack some: 0."""
    found: dict[str, dict[str, int]] = {}
    for head, beginning in OF_GROUPS.items():
        for what, count in sorted(counts.items()):
            if what.startswith(beginning):
                found.setdefault(what.removeprefix(beginning), dict.fromkeys(OF_GROUPS, 0))[head] = count
    return found


def given_up(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each group and topic with messages that are not lost, and that the group will not handle as it is."""
    return [
        f"Group {group!r} has not handled messages of {topic}: {', '.join(parts)}."
        for topic, of_topic in sorted(counts.items())
        for group, found in sorted(by_group(of_topic).items())
        if (parts := _parts(found["dead letters"], found["discarded"]))
    ]


def _parts(dead_letters: int, discarded: int) -> list[str]:
    kept = [f"{dead_letters} {'is a dead letter' if dead_letters == 1 else 'are dead letters'}"] if dead_letters else []
    gone = [f"{discarded} {'was' if discarded == 1 else 'were'} discarded by operators"] if discarded else []
    return kept + gone
