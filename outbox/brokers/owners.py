"""The owner of a consumer group, for brokers that store it on their servers."""

from __future__ import annotations

from typing import NamedTuple

URN = "urn:uuid:"


class GroupOwner(NamedTuple):
    """
    The outbox with a group's inbox.

    Args:
        source: its stable id, without the prefix of a URN; "" where it is not known.
        project: its project, for people; "" where it is not known.
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
    """The outboxes with the inboxes of a client's groups."""

    def __init__(self) -> None:
        self._of: dict[str, GroupOwner] = {}

    def set(self, group: str, owner: GroupOwner) -> None:
        """Note in which outbox a group has its inbox."""
        self._of[group] = owner

    def get(self, group: str) -> GroupOwner:
        """Return the outbox with a group's inbox; NO_OWNER where it is not known."""
        return self._of.get(group, NO_OWNER)

    def groups(self) -> list[str]:
        """Return the groups whose outbox is known."""
        return sorted(self._of)


class OwnedByAnother(Exception):
    """Raised when a group belongs to another outbox. Its arguments: the problem, and the remedy."""

    def __init__(self, subject: str, group: str, theirs: GroupOwner, ours: GroupOwner, *, apart: str) -> None:
        """
        Args:
            subject: what belongs to another one, at the beginning of a sentence.
            apart: the server's means to keep projects apart, such as a virtual host.
        """
        super().__init__(
            f"{subject} belongs to {theirs}, and this is {ours}: a consumer group has its inbox in one database.",
            f"Give this group another name, or each project {apart}. If the other database, which has that id in its table "
            f"outbox_source, is gone for good, run outbox_consume --group {group} --take-over once.",
        )
        self.theirs = theirs

    def __str__(self) -> str:
        return " ".join(self.args)
