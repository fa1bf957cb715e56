"""`lab compare`: runs side by side."""
