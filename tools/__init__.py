"""Scripts that make the numbers of the docs, and the tools of the tests."""
