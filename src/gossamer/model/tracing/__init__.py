"""Follow a model on tensors without values, and observe what happens to channels, MACs and layer order."""
