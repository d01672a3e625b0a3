"""
The snapshot of all message types, which a project commits to its repository like its migrations, and the changes since then.

| question | file |
|---|---|
| What is the JSON Schema of a message type? | `json_schema.py` |
| What does a snapshot contain, and how is it read and written? | `snapshot.py` |
| Which bodies of one schema does a reader of another schema reject? | `misfits.py` |
| Which changes break other releases or programs, and which line of code corrects each? | `changes.py` |

`outbox/monitoring/stored.py` checks whether the messages that are stored in a database can be read.
"""
