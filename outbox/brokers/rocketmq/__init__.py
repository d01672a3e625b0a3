"""
Apache RocketMQ 5: transaction, normal, fifo and delay topics. Needs the extra `rocketmq`.

RocketMQ's words in this project's words: the *message id* of a half message is the half id; a *producer* is a client that
announced a topic; *pop* is receive, *receipt handle* is receipt, *delivery attempt* is delivery count, *invisible duration* is
`invisible_for`. To *end* a half message is to commit it or roll it back.
"""

from outbox.brokers.rocketmq.broker import RocketMQBroker

__all__ = ["RocketMQBroker"]
