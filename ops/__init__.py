"""Operations of the model's forward pass that PyTorch does not have in this form."""
