"""
The state machine: every statement that writes `outbox_batch`, one function per edge of the drawing in docs/state-machine.md.

A step is a one-row UPDATE whose WHERE names the batch's state and attempt. An UPDATE that matches nothing means that the fence
was lost: another process has the batch, or this very step was written before and its answer was lost (`fence.is_decided`).
"""
