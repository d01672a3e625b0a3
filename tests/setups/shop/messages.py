from outbox import Message


class OrderPlaced(Message):
    order_id: int

    class Meta:
        topic = "orders"
        key = "order_id"
