"""
Other packages that write messages into the transaction and relay them, beside ours.

Each is used as its documents say, with its own defaults, in an environment of its own (`make bench-peers`), on a database of its
own. All write the same row by the same model, and hand over to a function that notes the time.
"""
