"""Scripts that measure the figures in the documentation, and tools for the tests."""
