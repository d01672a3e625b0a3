"""What is announced. Sent with `send_robust`: a listener's error is logged and hurts nobody."""

from django.dispatch import Signal

message_dead = Signal()  # message_id, topic, reason: the relay gave a message up
check_back_answered = Signal()  # half, answer: a broker asked and was answered
dead_lettered = Signal()  # group, message_id, topic, reason: a consumer gave a message up
gap_found = Signal()  # group, source, topic, lane, first, last: numbers that did not arrive in time
fence_lost = Signal()  # batch_id, attempt, step: a write-back met another relay's attempt
alert = Signal()  # reason, details: something that needs an operator
