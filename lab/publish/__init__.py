"""`lab publish`: export a run as a standard GPT-2, and upload it to the Hugging Face hub."""
