from datetime import timedelta

import pytest

from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.config import AuditedGroup, Business
from tests.outbox.pipeline.spark.together import together
from tests.outbox.pipeline.spark.worlds import NOW, OURS, START, World, made_anew, message_id, said


def ids(*numbers):
    return tuple(message_id("orders", 0, number) for number in numbers)


@together
class TestAWholeHistory:
    def test_has_no_findings(self):
        report = yield World().add(40).add(30, lane=1)

        assert said(report) == []
        assert report.counts["orders"] == {
            "assigned": 70,
            "outbox": 70,
            "sent": 70,
            "explained": 0,
            "broker": 70,
            "in flight": 0,
            "handled by cart": 70,
            "handled by points": 70,
            "dead letters of cart": 0,
            "dead letters of points": 0,
            "discarded by operators for cart": 0,
            "discarded by operators for points": 0,
            "unread by cart": 0,
            "unread by points": 0,
        }


@together
class TestALoss:
    def test_is_named_at_the_first_hop_where_something_is_missing(self):
        world = World().add(60)
        world.drop("messages", "places", "broker", "inbox", number=[5, 6, 7])
        world.drop("broker", "inbox", number=20)
        world.drop("inbox", number=[30, 31], consumer_group="cart")

        report = yield world

        by_number = [one for one in report.findings if one.lane == 0]
        assert [(str(one.stage), one.group, one.first, one.last, one.ids) for one in by_number] == [
            ("broker", "", 20, 20, ids(20)),
            ("inbox", "cart", 30, 31, ids(30, 31)),
            ("outbox", "", 5, 7, ()),
        ]
        (without,) = [one for one in report.findings if one.lane < 0]
        assert without.about == ("shop.order:orders-0-5", "shop.order:orders-0-6", "shop.order:orders-0-7")

    def test_of_the_last_numbers_is_seen(self):
        world = World().add(50).drop("business", "messages", "places", "broker", "inbox", number=[48, 49, 50])
        world.drop("business", about=[f"shop.order:orders-0-{number}" for number in (48, 49, 50)])

        assert said((yield world)) == [("lost", "outbox", "", 48, 50, 3)]

    def test_of_a_whole_block_and_of_a_whole_lane_is_seen(self):
        world = World(config=World().set(business=[]).config).add(10).add(10, first=70_001).mark(5, lane=3)

        assert said((yield world)) == [("lost", "outbox", "", 11, 70_000, 69_990), ("lost", "outbox", "", 1, 5, 5)]

    def test_is_explained_by_a_dead_or_discarded_batch_or_a_dead_letter(self):
        world = World().set(groups=[AuditedGroup("cart", ["orders"])]).add(8)
        world.change("places", {"state": "dead"}, number=1).change("places", {"state": "discarded"}, number=2)
        world.drop("broker", "inbox", number=[1, 2]).drop("inbox", number=4)
        dead = {"consumer_group": "cart", "source": OURS, "topic": "orders", "lane": 0, "number": 4, "outcome": "dead"}
        world.frames["failed_deliveries"] = [{**dead, "message_id": message_id("orders", 0, 4), "at": START}]

        assert said((yield world)) == []

    def test_is_not_what_an_operator_discarded_which_is_counted_apart(self):
        world = World().set(groups=[AuditedGroup("cart", ["orders"])]).add(8).drop("inbox", number=[3, 4])
        acted = {"consumer_group": "cart", "source": OURS, "topic": "orders", "lane": 0, "outcome": "discarded", "at": START}
        world.frames["failed_deliveries"] = [{**acted, "number": n, "message_id": message_id("orders", 0, n)} for n in (3, 4)]

        report = yield world

        assert said(report) == []
        assert report.counts["orders"]["discarded by operators for cart"] == 2

    def test_is_not_what_is_younger_than_the_settle_time(self):
        young = NOW - timedelta(seconds=10)
        world = World().add(9).change("places", {"at": young}, number=8).change("broker", {"at": young}, number=9)
        world.drop("broker", "inbox", number=8).drop("inbox", number=9)

        assert said((yield world)) == []

    def test_is_not_what_the_broker_still_has_for_the_group(self):
        world = World().add(9).drop("inbox", number=9, consumer_group="points")
        waiting = {"consumer_group": "points", "source": OURS, "topic": "orders", "lane": 0, "number": 9, "outcome": "waiting"}
        world.frames["failed_deliveries"] = [{**waiting, "message_id": message_id("orders", 0, 9), "at": START}]

        assert said((yield world)) == [("late", "inbox", "points", 9, 9, 1)]

    def test_of_a_message_row_or_of_all_that_would_send_it_is_named_by_id(self):
        world = World().set(business=[]).add(5).mark(4)
        world.drop("places", "broker", "inbox", number=5).drop("messages", number=2)

        found = {one.detail: one.ids for one in (yield world).findings}

        assert found == {
            "no ticket, delayed row or batch refers to it, so no relay would send it": ids(5),
            "its message row is missing": ids(2),
        }


@together
class TestAnOrphan:
    def test_is_in_the_inbox_or_at_the_broker_without_an_outbox_row(self):
        world = World().set(business=[]).add(20).drop("messages", "places", number=[3, 4]).drop("broker", number=4)

        assert said((yield world)) == [
            ("orphan", "broker", "", 3, 3, 1),
            ("orphan", "inbox", "cart", 4, 4, 1),
            ("orphan", "inbox", "points", 4, 4, 1),
        ]

    def test_is_a_message_without_its_order(self):
        world = World().add(5).drop("business", about="shop.order:orders-0-2")

        (found,) = (yield world).findings

        assert (str(found.kind), found.subject, found.about) == ("orphan", "orders", ("shop.order:orders-0-2",))

    def test_is_none_of_other_databases(self):
        world = World().add(5)
        world.frames["inbox"].append({**world.frames["inbox"][0], "source": "urn:uuid:theirs", "message_id": "theirs"})

        report = yield world

        assert (said(report), report.foreign) == ([], 1)


@together
class TestARepeat:
    def test_is_a_duplicate_where_the_message_is_the_same(self):
        world = World().add(9)
        world.frames["broker"] += [dict(row) for row in world.frames["broker"][3:5]]

        (found,) = (yield world).findings

        assert (str(found.kind), str(found.stage), found.first, found.last, found.count) == ("duplicated", "broker", 4, 5, 2)
        assert found.ids == ids(4, 5)

    def test_is_a_number_used_twice_where_the_messages_differ(self):
        world = World().add(9)
        world.frames["inbox"].append({**world.frames["inbox"][0], "message_id": message_id("orders", 0, 2)})

        assert ("renumbered", "inbox", "cart", 1, 1, 2) in said((yield world))


@together
class TestNumbers:
    def test_above_the_mark_say_that_the_lane_went_back(self):
        world = World().add(9).mark(6)

        assert said((yield world)) == [("beyond the last number", "outbox", "", 7, 9, 3)]

    def test_that_no_lane_gives_out_are_named(self):
        world = World().add(9)
        world.frames["broker"] += [{**world.frames["broker"][0], "number": number} for number in (0, -7, 2**62)]

        assert ("no number", "broker", "", -7, 2**62, 3) in said((yield world))

    def test_of_a_lane_that_vanished_are_named(self):
        world = World().add(9).add(4, lane=2)
        world.frames["marks"] = [mark for mark in world.frames["marks"] if mark["lane"] != 2]
        world.drop("inbox", lane=2, number=3, consumer_group="cart")

        assert said((yield world)) == [("lost", "inbox", "cart", 3, 3, 1), ("unknown lane", "outbox", "", 1, 4, 4)]

    def test_of_0_below_and_beyond_are_named_wherever_they_stand(self):
        world = World().set(business=[]).add(3)
        for name, number in (("places", 0), ("broker", -1), ("inbox", 1 << 60)):
            row = next(row for row in world.frames[name] if row["number"] == 2)
            world.frames[name].append({**row, "number": number})

        found = {one for one in said((yield world)) if one[0] == "no number"}

        assert found == {
            ("no number", "outbox", "", 0, 0, 1),
            ("no number", "broker", "", -1, -1, 1),
            ("no number", "inbox", "", 1 << 60, 1 << 60, 1),
        }

    def test_that_run_backwards_are_out_of_order_where_order_was_promised(self):
        world = World().set(business=[], ordered_topics=["orders"]).add(9)
        world.frames["broker"] = [{**row, "pos": 10 - row["pos"]} for row in world.frames["broker"]]

        assert {(kind, first) for kind, _, _, first, _, _ in said((yield world))} == {("out of order", n) for n in range(1, 9)}


@together
class TestLateness:
    def test_is_what_is_still_in_the_outbox(self):
        world = World().add(6)
        world.change("places", {"state": "prepared"}, number=2).change("places", {"state": "waiting", "number": None}, number=6)
        world.mark(5).drop("broker", "inbox", number=[2, 6])

        late = (yield world).findings

        assert [(str(one.kind), one.first, one.ids) for one in late] == [("late", -1, ids(6)), ("late", 2, ids(2))]


@together
class TestMessagesWithoutANumber:
    def test_are_joined_by_id(self):
        world = World().add(5)
        for name in ("places", "broker", "inbox"):
            world.change(name, {"number": None, "lane": None})
        world.frames["marks"] = []
        gone = {number: message_id("orders", 0, number) for number in range(1, 6)}
        world.drop("broker", "inbox", message_id=gone[1]).drop("inbox", message_id=gone[2], consumer_group="cart")
        world.drop("messages", "places", message_id=gone[3]).drop("business", about="shop.order:orders-0-3")

        found = {(str(one.kind), str(one.stage), one.group): one.ids for one in (yield world).findings}

        assert found == {
            ("lost", "broker", ""): ids(1),
            ("lost", "inbox", "cart"): ids(2),
            ("orphan", "broker", ""): ids(3),
        }


@together
class TestOrder:
    def test_is_broken_by_what_comes_behind_a_later_message_of_its_key(self):
        world = World().set(ordered_topics=["orders"]).add(5).change("broker", {"pos": 99}, number=2)

        assert said((yield world)) == [("out of order", "broker", "", 2, 2, 1)]

    def test_is_not_that_of_positions_where_a_broker_was_made_anew(self):
        assert said((yield made_anew())) == [("out of order", "broker", "", 7, 7, 1)]

    def test_is_asked_of_ordered_topics_only(self):
        world = World().set(ordered_topics=["bills"]).add(5).change("broker", {"pos": 99}, number=2)

        assert said((yield world)) == []


@together
class TestClocks:
    def test_that_run_ahead_are_named(self):
        world = World().add(9).change("broker", {"at": NOW + timedelta(minutes=5)}, number=3)

        assert "clock" in {kind for kind, *_ in said((yield world))}


@together
class TestAGroupThatBeganLate:
    def test_owes_nothing_that_was_there_before(self):
        world = World().set(groups=[AuditedGroup("late", ["orders"], is_from_start=False)]).add(9)
        world.drop("inbox", number=[1, 2, 6])

        assert said((yield world)) == [("lost", "inbox", "late", 6, 6, 1)]


class TestAPrunedHistory:
    def test_is_audited_from_where_it_is_whole(self, spark):
        since = START + timedelta(seconds=0.055)
        world = World().set(since=since, business=[]).add(9).mark(9, first=6)
        world.drop("messages", "places", "broker", "inbox", number=[1, 2, 3]).drop("broker", "inbox", number=7)

        assert said(world.audit(spark)) == [("lost", "broker", "", 7, 7, 1)]

    def test_needs_to_know_when_business_rows_were_written(self, spark):
        world = World().set(since=START, business=[Business("orders", "orders", "shop.order")]).add(3)

        with pytest.raises(HistoryError, match=r'orders were written. Set OUTBOX\["PIPELINE"\]\["AUDIT"\]'):
            world.audit(spark)
