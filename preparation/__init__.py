"""Documents to token files: the implementation of prepare_dataset.py. Needs no torch."""
