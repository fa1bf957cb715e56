"""`lab sweep`: train changes to a run, and compare them with it."""
