"""`lab plan`: estimate the memory, hours and dollars of a run before it is launched."""
