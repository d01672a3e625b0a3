from outbox.pipeline.figures import by_group, given_up

COUNTS = {
    "assigned": 9,
    "handled by cart": 4,
    "handled by points": 9,
    "dead letters of cart": 1,
    "discarded by operators for cart": 2,
    "unread by cart": 2,
}


class TestByGroup:
    def test_tells_what_became_of_messages_in_each_group(self):
        assert by_group(COUNTS) == {
            "cart": {"handled": 4, "dead letters": 1, "discarded": 2, "unread": 2},
            "points": {"handled": 9, "dead letters": 0, "discarded": 0, "unread": 0},
        }

    def test_knows_runs_that_counted_less(self):
        assert by_group({"handled by cart": 4})["cart"]["discarded"] == 0


class TestGivenUp:
    def test_names_the_groups_that_will_not_handle_something(self):
        assert given_up({"orders": COUNTS, "bills": {"handled by cart": 3}}) == [
            "Group 'cart' has not handled messages of orders: 1 is a dead letter, 2 were discarded by operators."
        ]
