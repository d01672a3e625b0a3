"""A storm on Celery's tasks: processes, servers and what is counted."""
