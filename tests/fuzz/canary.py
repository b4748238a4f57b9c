"""Inputs of the fuzz tests name this module; it is imported only when an input made Gossamer import it."""


def touch(*_: object, **__: object) -> None:
    """What an input asks to call."""
