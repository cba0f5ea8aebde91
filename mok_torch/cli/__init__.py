"""The commands of `python -m mok_torch`."""
