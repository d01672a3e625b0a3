"""
The catalogue: which messages are sent here, who handles them, and what is promised about them.

| question | file |
|---|---|
| What do the code and the settings say about types, topics and handlers? | `entries.py` |
| What does a body of a type look like? | `examples.py` |
| How do other languages read it? | `asyncapi.py` |
| How many messages of each type were published and handled lately? | `traffic.py` |
"""
