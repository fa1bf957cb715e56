"""`lab doctor`: check whether this machine, or each node of a launch, is fit to train."""
