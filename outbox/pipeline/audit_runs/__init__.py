"""Stored audits: run the job in a child process, sign and store its result, send alerts."""
