"""Token files, the batches read from them, and the tokenizers."""
