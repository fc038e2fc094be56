"""The commands `convert` and `check`."""
