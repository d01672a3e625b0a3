"""An audit's counts of consumer groups, which are encoded in the names of counts."""

from __future__ import annotations

from collections.abc import Mapping

OF_GROUPS = {
    "handled": "handled by ",
    "dead letters": "dead letters of ",
    "discarded": "discarded by operators for ",
    "unread": "unread by ",
}
"""Table heading -> prefix of the count's name, which ends with the group; as made by `spark.transforms.judge`."""


def by_group(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return group -> heading -> count, from the counts of a topic; 0 if a run of an older version lacks one."""
    found: dict[str, dict[str, int]] = {}
    for head, beginning in OF_GROUPS.items():
        for what, count in sorted(counts.items()):
            if what.startswith(beginning):
                found.setdefault(what.removeprefix(beginning), dict.fromkeys(OF_GROUPS, 0))[head] = count
    return found


def given_up(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each group and topic with dead or discarded messages, which are not lost and will not be handled."""
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
