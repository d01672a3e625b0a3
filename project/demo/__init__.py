"""
The demo: the shop gets a day of real orders while relays and consumers are killed, and a report is read from the database.

`processes.py` starts and restarts processes, `kills.py` plans which process is killed at which point, `feed.py` sends the orders,
`scenario.py` puts these together, `report.py` counts the results, and `screen.py` shows them.
"""
