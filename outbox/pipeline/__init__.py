"""
The data pipeline, a Django app of its own: was anything lost, how long did it take, why is there a backlog; and the archive.

`spark/` holds the jobs. Nothing in it imports Django: a job gets all it needs as one `PipelineConfig`, written as JSON.
"""
