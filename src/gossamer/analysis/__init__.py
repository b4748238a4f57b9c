"""Analysis of models and recipes without training: sizes, hardware support, sensitivity and proposals."""
