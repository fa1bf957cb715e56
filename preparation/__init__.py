"""Documents to token files: what prepare_dataset.py is made of. Needs no torch."""
