"""The current time in SQL, by the database's clock, unless a test passes it as the parameter `now`."""

NOW = "coalesce(%(now)s::timestamptz, statement_timestamp())"
