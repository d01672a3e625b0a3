"""
The owner of a consumer group: stored by the first receive, so that two projects do not share a group.

The note is an entry in the configuration that name servers keep for clients (`kvConfig.json`). They do not exchange it, so it is
written to each that has none, and the first one in NAME_SERVERS that has it is believed. Without them nothing is compared.
Source: apache/rocketmq KVConfigManager, PutKVConfigRequestHeader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outbox.brokers.owners import GroupOwner, GroupOwners, OwnedByAnother
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, RemotingError, Request
from outbox.logs import get_logger, log_fields

logger = get_logger(__name__)

NAMESPACE = "OUTBOX_GROUPS"  # of our entries
AGAIN_SECONDS = 10.0  # after a refusal, or when no name server answers

UNANSWERED = (NotConnected, NoAnswer, RemotingError)


class RocketMQOwners(GroupOwners):
    """
    The owners of groups, and their notes on the name servers.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, client: RocketMQClient, clock: Callable[[], float]) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}  # group -> whose it is, and what to do
        self._client = client
        self._clock = clock
        self._ask_again_at: dict[str, float] = {}

    def may_receive(self, group: str) -> bool:
        """Return whether a group is not another project's, and note that it is ours. Asks once, and again after a refusal."""
        if group in self._of and self._clock() >= self._ask_again_at.get(group, float("-inf")):
            self._ask_again_at[group] = float("inf")
            try:
                self._client.run(self._claim(group))
                self.refused.pop(group, None)
            except OwnedByAnother as error:
                self._ask_again_at[group] = self._clock() + AGAIN_SECONDS
                logger.error("Group %r receives nothing: %s", group, error, extra=log_fields(group=group))
                self.refused[group] = str(error)
            except UNANSWERED:  # consumers go on while name servers are away
                self._ask_again_at[group] = self._clock() + AGAIN_SECONDS
        return group not in self.refused

    def require(self, group: str) -> None:
        """Raise OwnedByAnother if a group is another project's. Notes nothing."""
        if group in self._of:
            self._client.run(self._require(group))

    def take_over(self, group: str) -> None:
        """
        Record on all name servers that this outbox owns a group.

        Raises:
            NotConnected, NoAnswer, RemotingError: a name server has not stored it.
        """
        self._client.run(self._write(group, self._client.options.name_servers))
        self._ask_again_at.pop(group, None)

    async def _claim(self, group: str) -> None:
        if lacking := await self._require(group):
            await self._write(group, lacking)
            await self._require(group)  # another project may have written at the same moment

    async def _require(self, group: str) -> list[str]:
        """Return the name servers without a note of a group. Raises OwnedByAnother if it is noted as another project's."""
        answers = await self._ask(Request(requests.GET_KV_CONFIG, self._entry(group)))
        lacking = [server for server, answer in answers.items() if answer.code == requests.NOTHING_FOUND]
        notes = [answer.checked().fields["value"] for server, answer in answers.items() if server not in lacking]
        ours = self._of[group]
        source, _, project = notes[0].partition(" ") if notes else (ours.source, "", "")
        if source != ours.source:
            theirs = GroupOwner(source, project)
            raise OwnedByAnother(f"Consumer group {group!r}", group, theirs, ours, apart="a NAMESPACE of its own")
        return lacking

    async def _write(self, group: str, servers: Iterable[str]) -> None:
        """Note that a group is ours. Raises as `RemotingClient.ask`, and RemotingError."""
        owner = self._of[group]
        request = Request(requests.PUT_KV_CONFIG, {**self._entry(group), "value": f"{owner.source} {owner.project}"})
        for server in servers:
            (await self._client.remoting.ask(server, request)).checked()

    async def _ask(self, request: Request) -> dict[str, RemotingAnswer]:
        """Ask all name servers; return the answers of those that are there. Raises as `RemotingClient.ask` if none is."""
        answers: dict[str, RemotingAnswer] = {}
        failure: Exception | None = None
        for server in self._client.options.name_servers:
            try:
                answers[server] = await self._client.remoting.ask(server, request)
            except (NotConnected, NoAnswer) as error:
                failure = error
        if failure is not None and not answers:
            raise failure
        return answers

    def _entry(self, group: str) -> dict[str, str]:
        return {"namespace": NAMESPACE, "key": f"{self._client.options.namespace}%{group}"}
