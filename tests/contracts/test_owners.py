"""Two projects, each with a database of its own, on one server: a group of one name belongs to one of them."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from outbox.brokers.capabilities import Receives
from outbox.message import TopicType
from tests.contracts.acts import BLOG, SHOP, Acts
from tests.contracts.harness import Harness

NORMAL = TopicType.NORMAL

pytestmark = pytest.mark.needs("keeps_owners")

Join = Callable[..., Receives]


@pytest.fixture
def group(harness: Harness) -> str:
    name = harness.new_group("billing")
    harness.topics = {kind: replace(topic, groups=frozenset({name})) for kind, topic in harness.topics.items()}
    return name


@pytest.fixture
def join(harness: Harness, group: str) -> Join:
    """Open a client of a project's group."""

    def join(project: tuple[str, str], name: str = group) -> Receives:
        broker = Receives.of(harness.open())
        broker.set_owner(name, *project)
        return broker

    return join


@pytest.fixture
def receive(acts: Acts, group: str) -> Callable[..., list[bytes]]:
    """Receive and acknowledge messages; return their bodies."""

    def receive(broker: Receives, kind: TopicType = NORMAL, *, name: str = group, count: int = 0) -> list[bytes]:
        deliveries = acts.receive(kind, group=name, broker=broker, count=count)
        broker.ack(deliveries)
        return [delivery.body for delivery in deliveries]

    return receive


@pytest.fixture
def own(acts: Acts, join: Join, receive) -> Callable[..., Receives]:
    """Open a client of the shop, whose group has handled a message: from then on, the group is the shop's."""

    def own(kind: TopicType = NORMAL) -> Receives:
        shop = join(SHOP)
        receive(shop, kind)
        acts.send_bodies(b"first", kind=kind, key="7")
        receive(shop, kind, count=1)
        return shop

    return own


class TestGroupOfAnotherProject:
    @pytest.mark.parametrize("kind", [NORMAL, TopicType.FIFO])
    def test_receives_nothing_and_names_the_owner(self, acts: Acts, own, join: Join, receive, caplog, kind: TopicType):
        shop, blog = own(kind), join(BLOG)
        acts.send_bodies(b"a", kind=kind, key="7")

        taken = [receive(blog, kind) for _ in range(3)]

        assert taken == [[], [], []]
        assert SHOP[0] in blog.refusals[acts.harness.topic(kind)]
        assert caplog.text.count(f"this is the project 'blog' (outbox {BLOG[0]})") == 1
        assert receive(shop, kind, count=1) == [b"a"]
        assert "belongs to" not in str(shop.refusals)

    def test_is_found_by_check_with_what_to_do(self, harness: Harness, own, join: Join, group: str):
        shop, blog = own(), join(BLOG)

        [problem] = [one for one in blog.check() if "belongs to" in one.text]

        assert SHOP[0] in problem.text
        assert f"Give this group another name, or each project {harness.keeps_owners}" in problem.hint
        assert f"outbox_consume --group {group} --take-over" in problem.hint
        assert not [one for one in shop.check() if "belongs to" in one.text]

    @pytest.mark.needs("HasDeadLetterQueue")
    def test_receives_nothing_that_the_server_gave_up(self, acts: Acts, harness: Harness, own, join: Join, group: str):
        shop, blog = own(), join(BLOG)
        harness.give_up(group, acts.send_bodies(b"a"))

        taken = blog.receive_dead_letters(group, [harness.topic(NORMAL)], limit=10)

        assert taken == []
        [given_up] = shop.receive_dead_letters(group, [harness.topic(NORMAL)], limit=10)
        shop.ack([given_up])

    def test_owns_it_after_it_was_taken_over(self, acts: Acts, own, join: Join, receive, group: str):
        shop, blog = own(), join(BLOG)
        shop.close()
        acts.send_bodies(b"a")

        blog.set_owner(group, *BLOG, take_over=True)
        again = join(SHOP)

        assert receive(blog, count=1) == [b"a"]
        assert receive(again) == []
        assert BLOG[0] in again.refusals[acts.harness.topic(NORMAL)]


class TestGroupOfOneProject:
    def test_is_shared_by_its_processes_and_stays_its_own_under_another_name(self, acts: Acts, own, join: Join, receive):
        first, renamed = own(), join((SHOP[0], "market"))
        receive(renamed)
        first.close()
        acts.send_bodies(b"a")

        taken = receive(renamed, count=1)

        assert taken == [b"a"]
        assert "belongs to" not in f"{first.refusals}{renamed.refusals}"


class TestGroupOfAnotherName:
    def test_gets_the_messages_of_another_projects_topic(self, acts: Acts, join: Join, receive):
        mail = acts.harness.new_group("mail")
        shop, blog = join(SHOP), join(BLOG, mail)
        receive(shop)
        receive(blog, name=mail)

        acts.send_bodies(b"a")

        assert receive(blog, name=mail, count=1) == [b"a"]
        assert receive(shop, count=1) == [b"a"]
