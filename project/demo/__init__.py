"""
The demo: a day of real orders through the shop while relays and consumers are killed, and a report from the database.

`processes.py` starts and restarts, `kills.py` says who dies where, `feed.py` sends the orders, `scenario.py` is the course of
it, `report.py` counts what came of it and `screen.py` shows it.
"""
