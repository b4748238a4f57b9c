"""Tracing a model: one tracer, and observers for MACs, coupled channels, and the ends of a network."""
