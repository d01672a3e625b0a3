"""The SQL twin of the Spark jobs: audit, latency and backlog of the last minutes or hours, in PostgreSQL alone, without a JVM."""
