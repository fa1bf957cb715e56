"""What surrounds a train: `uv run lab <verb>`."""
