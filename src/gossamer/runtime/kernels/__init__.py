"""Native kernels over planar activations."""
