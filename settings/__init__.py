"""The keys of a run's two JSON files by topic, each with its limits and rules."""
