"""Third-party servers, downloaded and started for tests, benchmarks and the demo."""
