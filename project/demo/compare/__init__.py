"""
`outbox_demo --compare`: the same day with the same kills in three ways, two of them without an outbox.

`shop/` is the shop of the comparison, whose views and tasks differ only in the way of sending. `ways.py` has the processes of
each way, `kills.py` plans the kills, `course.py` plays a day, `stage.py` starts everything and plays the three days, and
`report.py` counts the results.
"""
