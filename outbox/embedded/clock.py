"""The current time in SQL: the database's, or the parameter `now` of a test."""

NOW = "coalesce(%(now)s::timestamptz, statement_timestamp())"
