"""Reports about finished or running runs, from their records: sentences and tables as Markdown, and
HTML with drawings. Start at `page`."""
