"""Reports on finished or running runs, from their records. Start at `page`."""
