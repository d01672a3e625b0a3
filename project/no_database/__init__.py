"""The database backend if DATABASE_URL is not set: PostgreSQL's, but a connection raises an error that says what to set."""
