"""The explorer of schedules: the framework's processes as threads that a seeded scheduler lets go on, one at a time."""
