"""The owner of a consumer group, for brokers that store it on their servers."""

from __future__ import annotations

from typing import NamedTuple

URN = "urn:uuid:"


class GroupOwner(NamedTuple):
    """
    The outbox that owns a group, because its database has the group's inbox.

    Args:
        source: the stable id of the outbox, without the prefix of a URN; "" if unknown.
        project: the name of its project, for people; "" if unknown.
    """

    source: str
    project: str

    @classmethod
    def of(cls, source: str, project: str) -> GroupOwner:
        return cls(source.removeprefix(URN), project)

    def __str__(self) -> str:
        if self.project:
            return f"the project {self.project!r} (outbox {URN}{self.source})"
        return f"the outbox {URN}{self.source}" if self.source else "another outbox"


NO_OWNER = GroupOwner("", "")


class GroupOwners:
    """The owners of the groups for which a client receives."""

    def __init__(self) -> None:
        self._of: dict[str, GroupOwner] = {}

    def set(self, group: str, owner: GroupOwner) -> None:
        """Record the owner of a group."""
        self._of[group] = owner

    def get(self, group: str) -> GroupOwner:
        """Return the owner of a group; NO_OWNER if unknown."""
        return self._of.get(group, NO_OWNER)

    def groups(self) -> list[str]:
        """Return the groups whose owner is known."""
        return sorted(self._of)


class OwnedByAnother(Exception):
    """Raised if another outbox owns a group. `args` are the problem and the remedy."""

    def __init__(self, subject: str, group: str, theirs: GroupOwner, ours: GroupOwner, *, separation: str) -> None:
        """
        Args:
            subject: the group, or its queue, at the beginning of a sentence.
            separation: a means of the server to separate projects, such as "a virtual host of its own".
        """
        super().__init__(
            f"{subject} belongs to {theirs}, and this is {ours}: a consumer group has its inbox in one database.",
            f"Give this group another name, or each project {separation}. If the other database, which has that id in its table "
            f"outbox_source, is gone for good, run outbox_consume --group {group} --take-over once.",
        )
        self.theirs = theirs

    def __str__(self) -> str:
        return " ".join(self.args)
