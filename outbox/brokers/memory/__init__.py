"""A broker in the memory of the process, for tests: all of the contract, any fault on demand."""

from outbox.brokers.memory.broker import MemoryBroker

__all__ = ["MemoryBroker"]
