"""What a run reports: console, metrics, summary, charts, samples, time and cost."""
