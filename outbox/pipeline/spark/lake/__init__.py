"""The lake: where finished days lie when the database has let them go. Parquet, and records of what counts."""
