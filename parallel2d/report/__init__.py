"""What a finished or running run has to show, as a page: rows of ``metrics.jsonl`` flow in,
Markdown and HTML with plots flow out."""
