"""Files of weights: safetensors with dense, bit-mask, 2:4 and quantized tensors."""
