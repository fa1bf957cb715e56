"""`lab evaluate`: loss on held-out tokens, and benchmarks."""
