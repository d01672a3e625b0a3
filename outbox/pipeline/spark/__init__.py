"""
Spark jobs over the whole history: was anything lost, how long did it take, why is there a backlog.

Nothing here imports Django, and nothing heavy is imported before a job runs. A job gets all it needs as one
`PipelineConfig`, written as JSON.
"""
