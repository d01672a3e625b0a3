"""
Apache RocketMQ 5, over gRPC: transaction, normal, fifo and delay topics. Needs the extra `rocketmq`.

Foreign words: a half message's *message id* there is our half id; a *producer* is whoever named a topic in its settings;
*pop* is receive, *receipt handle* a receipt, *delivery attempt* an attempt, *invisible duration* how long a receive holds.
"""

from outbox.brokers.rocketmq.broker import RocketMQBroker

__all__ = ["RocketMQBroker"]
