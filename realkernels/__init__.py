"""What the kernels really do; imports no other room, so that it can witness against the predictions."""
