"""`lab tune` and `lab judge`: instruction tuning, and scores of its answers."""
