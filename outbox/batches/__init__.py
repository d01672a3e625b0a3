"""The state machine: every statement that writes `outbox_batch`, drawn in docs/state-machine.md."""
