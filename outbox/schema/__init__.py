"""
The snapshot of all message types, which a project commits as it commits its migrations, and what has changed since.

| question | file |
|---|---|
| What is the JSON Schema of a message type? | `json_schema.py` |
| What does a snapshot contain, and how is it read and written? | `snapshot.py` |
| Which bodies of one schema does a reader of another one refuse? | `misfits.py` |
| Which changes break others, and which line mends each? | `changes.py` |

Whether stored messages can be read is a question to the database: `outbox/monitoring/stored.py`.
"""
