"""The commands `manage.py outbox_…` of the core; those of the pipeline are in `outbox/pipeline/management/`."""
