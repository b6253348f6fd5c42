"""What is asked about a job or a run: a plan, a certificate, a preflight, a report."""
