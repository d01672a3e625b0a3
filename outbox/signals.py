"""The signals of the outbox. They are sent with `send_robust`: a receiver's error is logged, and has no other effect."""

from django.dispatch import Signal

message_dead = Signal()  #: A message was given up before it was sent, because its broker rejects it (message_id, topic, reason).
check_back_answered = Signal()  #: A check-back was answered (half, answer).
dead_lettered = Signal()  #: A message became a dead letter of a consumer group (group, message_id, topic, reason).
gap_found = Signal()  #: Numbers of a lane did not arrive in time (group, source, topic, lane, first, last).
fence_lost = Signal()  #: Another process has taken over the batch of a relay (batch_id, attempt, step).
alert = Signal()  #: Something needs an operator (reason, details).
