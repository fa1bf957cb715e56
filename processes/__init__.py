"""The processes of one run: command line, launch, agreement at start-up, watchdog."""
