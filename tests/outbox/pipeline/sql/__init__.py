"""The rules of the audit once more, in SQL: what Spark finds in a history is held to what PostgreSQL finds in it."""
