"""Reports about finished or running runs, from their ``metrics.jsonl``: Markdown, and HTML with
plots."""
