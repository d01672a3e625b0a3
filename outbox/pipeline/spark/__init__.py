"""
Spark jobs over the whole history: audit, latency, backlog, archive.

Nothing here imports Django, and heavy packages are imported only when a job runs. A job gets its whole configuration as one
`PipelineConfig` in JSON.
"""
