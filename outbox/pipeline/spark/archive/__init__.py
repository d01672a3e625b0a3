"""
The archive: copy a finished day to the lake, then delete it from the database. Plan, write, verify, commit, delete.

A row is deleted from the database after it is committed in the lake, so after a crash it is in both, never in neither. The next
run continues: a day that is not committed is written again, to a new folder; a committed day is deleted.
"""
