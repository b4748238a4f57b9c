"""The version of the package, for every layer to ask."""

__version__ = "0.1.0"
