"""
The data pipeline, a separate Django app: an audit for lost messages, latency and backlog reports, and the archive.

The jobs are in `spark/`, where nothing imports Django: a job gets its whole configuration as one `PipelineConfig` in JSON.
"""
