"""The search for the largest microbatch that fits in memory."""
