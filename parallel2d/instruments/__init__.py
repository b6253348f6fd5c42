"""What is asked about a job or a run, beside training it: a plan, a certificate, a preflight, a
report."""
