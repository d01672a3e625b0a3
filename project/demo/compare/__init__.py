"""
`outbox_demo --compare`: the same day with the same kills three ways, two of them without an outbox.

`shop/` is the shop that is played: its views and tasks differ by the way alone. `ways.py` says which processes each way has,
`kills.py` who dies where, `course.py` is the course of a day, `stage.py` starts all and plays the three days, and `report.py`
counts what came of them.
"""
