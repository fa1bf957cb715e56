"""`lab compare`: compare runs in one table and in charts."""
