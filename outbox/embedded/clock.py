"""The time by which the broker works: the database's, or one that a test hands in as `now`."""

NOW = "coalesce(%(now)s::timestamptz, statement_timestamp())"
