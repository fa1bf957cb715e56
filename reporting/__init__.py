"""What a run reports: log, metrics, summary, charts, samples, time and cost."""
