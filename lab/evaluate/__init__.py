"""`lab evaluate`: loss on held-out text, and benchmarks."""
