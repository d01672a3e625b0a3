"""The lake: Parquet files of archived days, and manifests that say which files are committed."""
