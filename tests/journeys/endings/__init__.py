"""Processes of the outbox that are told to end while a server is away, and what happens when it is back."""

VARIABLE = "ENDINGS_OPTIONS"  # OPTIONS of a RocketMQ broker, as JSON; without it messages go to the embedded one
