"""Files of weights: dense, bit mask, 2:4 and quantized tensors in one safetensors file."""
