"""
Apache RocketMQ 5: transaction, normal, fifo and delay topics. Needs the extra `rocketmq`.

RocketMQ's words and ours: the *message id* of a half message is our half id; a *producer* is a client that announced a topic;
*pop* is receive, *receipt handle* is receipt, *delivery attempt* is delivery count, *invisible duration* is `invisible_for`.
"""

from outbox.brokers.rocketmq.broker import RocketMQBroker

__all__ = ["RocketMQBroker"]
