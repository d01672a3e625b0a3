"""
The state machine: every statement that writes `outbox_batch`, one function per edge of the drawing in
docs/state-machine.md.

When a relay changes a batch that it holds, the UPDATE names the batch's state and attempt. If the UPDATE matches no row, the
fence was lost: another process has taken the batch over, or this step was written before and its answer was lost.
`fence.read_step` tells the two apart. Claims and the steps of operators name only the state, and lock the row.
"""
