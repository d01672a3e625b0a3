"""The signals of the outbox. They are sent with `send_robust`: a receiver's error is logged, and has no other effect."""

from django.dispatch import Signal

message_dead = Signal()  # message_id, topic, reason: the broker rejected a message
check_back_answered = Signal()  # half, answer: a check-back was answered
dead_lettered = Signal()  # group, message_id, topic, reason: a consumer group gave a message up
gap_found = Signal()  # group, source, topic, lane, first, last: numbers that did not arrive in time
fence_lost = Signal()  # batch_id, attempt, step: another process has taken over the batch of a relay
alert = Signal()  # reason, details: something needs an operator
