"""PostgreSQL's database backend for when DATABASE_URL is not set: everything works but a connection."""
