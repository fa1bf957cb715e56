"""One run's training: start-up checks, the step, validation, stopping, saving."""
