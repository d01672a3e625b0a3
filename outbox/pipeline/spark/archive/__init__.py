"""
The archive: a finished day goes to the lake, and only then out of the database. Plan, write, verify, commit, delete.

A row is in the database until the lake has it for good, so a crash leaves it in both, never in none. Whoever comes next goes
on where the dead one stopped: a day that is not committed is written anew, into a folder of its own; one that is, is deleted.
"""
