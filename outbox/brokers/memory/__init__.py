"""A broker in the memory of the process, for tests: it implements the whole contract, with faults on demand."""

from outbox.brokers.memory.broker import MemoryBroker

__all__ = ["MemoryBroker"]
