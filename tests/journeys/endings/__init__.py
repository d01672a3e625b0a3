"""Processes of the outbox that are told to end while a server is away, and what happens when it is back."""

INVISIBLE = "ENDINGS_INVISIBLE"  # seconds that a delivery is hidden
VARIABLE = "ENDINGS_OPTIONS"  # OPTIONS of a RocketMQ broker, as JSON; without it messages go to the embedded one
