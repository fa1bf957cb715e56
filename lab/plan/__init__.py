"""`lab plan`: memory, hours and dollars of a run before it starts."""
