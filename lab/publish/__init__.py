"""`lab publish`: a run as a stock GPT-2 for the Hugging Face ecosystem."""
