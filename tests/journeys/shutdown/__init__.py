"""Processes of the outbox that are told to end while a server is away, and what happens when it is back."""

TIME_LIMIT = "ENDINGS_TIME_LIMIT"  # seconds that a handler may take; without it there is no limit
INVISIBLE = "ENDINGS_INVISIBLE"  # seconds that a delivery is hidden
VARIABLE = "ENDINGS_OPTIONS"  # OPTIONS of a RocketMQ broker, as JSON; without it messages go to the embedded one
