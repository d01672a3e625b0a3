"""
The state machine: every statement that writes `outbox_batch`, one function per edge of the drawing in
docs/state-machine.md.

A relay's step on a batch that it holds is an UPDATE whose WHERE names the batch's state and attempt. Where it matches
nothing, the fence was lost: another process has the batch, or this very step was written before and its answer was
lost; `fence.read_step` tells the two apart. Claims and an operator's steps name the state, under a row lock.
"""
