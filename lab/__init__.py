"""The `lab` command: plan, evaluate, compare, tune and publish runs."""
