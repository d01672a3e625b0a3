"""
The owner of a consumer group: the outbox with the group's inbox. The first `receive` stores it, so that two projects cannot use
the same group.

The owner is stored as an entry in the configuration that name servers keep for clients (`kvConfig.json`). Name servers do not
exchange these entries. So an entry is written to each name server that lacks it; if the entries differ, the entry of the first
name server in NAME_SERVERS that has one counts. Without name servers, owners are neither stored nor compared.
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

NAMESPACE = "OUTBOX_GROUPS"  # the name servers' namespace for these entries
RETRY_SECONDS = 10.0  # name servers are asked again after this time, if they reported another owner or did not answer

NAME_SERVER_ERRORS = (NotConnected, NoAnswer, RemotingError)


class RocketMQOwners(GroupOwners):
    """
    The owners of groups, as set in this process and as stored on the name servers.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, client: RocketMQClient, clock: Callable[[], float]) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}  # group -> the text of OwnedByAnother
        self._client = client
        self._clock = clock
        self._ask_again_at: dict[str, float] = {}  # group -> when to ask the name servers again, by the clock; infinity: never

    def may_receive(self, group: str) -> bool:
        """
        Return False if another outbox owns a group. If the group has no owner yet, store this outbox as the owner.

        The first call asks the name servers. Later ones ask them again only after a refusal or an outage.
        """
        if group in self._of and self._clock() >= self._ask_again_at.get(group, float("-inf")):
            self._ask_again_at[group] = float("inf")
            try:
                self._client.run(self._claim(group))
                self.refused.pop(group, None)
            except OwnedByAnother as error:
                self._ask_again_at[group] = self._clock() + RETRY_SECONDS
                logger.error("Group %r receives no messages: %s", group, error, extra=log_fields(group=group))
                self.refused[group] = str(error)
            except NAME_SERVER_ERRORS:  # consumers continue to receive while name servers are unavailable
                self._ask_again_at[group] = self._clock() + RETRY_SECONDS
        return group not in self.refused

    def require(self, group: str) -> None:
        """Raise OwnedByAnother if another outbox owns a group. Store nothing."""
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
        if servers := await self._require(group):
            await self._write(group, servers)
            await self._require(group)  # another outbox may have written its entry at the same time

    async def _require(self, group: str) -> list[str]:
        """Return the name servers without an entry of a group. Raises OwnedByAnother if another outbox owns the group."""
        answers = await self._ask(Request(requests.GET_KV_CONFIG, self._key_of(group)))
        without_entry = [server for server, answer in answers.items() if answer.code == requests.NOTHING_FOUND]
        entries = [answer.checked().fields["value"] for server, answer in answers.items() if server not in without_entry]
        ours = self._of[group]
        source, _, project = entries[0].partition(" ") if entries else (ours.source, "", "")
        if source != ours.source:
            theirs = GroupOwner(source, project)
            raise OwnedByAnother(f"Consumer group {group!r}", group, theirs, ours, separation="a NAMESPACE of its own")
        return without_entry

    async def _write(self, group: str, servers: Iterable[str]) -> None:
        """Store this outbox as the owner of a group. Raises NotConnected, NoAnswer, RemotingError."""
        owner = self._of[group]
        request = Request(requests.PUT_KV_CONFIG, {**self._key_of(group), "value": f"{owner.source} {owner.project}"})
        for server in servers:
            (await self._client.remoting.ask(server, request)).checked()

    async def _ask(self, request: Request) -> dict[str, RemotingAnswer]:
        """Ask all name servers, and return the answers. Raises the same errors as `RemotingClient.ask` if none answers."""
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

    def _key_of(self, group: str) -> dict[str, str]:
        return {"namespace": NAMESPACE, "key": f"{self._client.options.namespace}%{group}"}
