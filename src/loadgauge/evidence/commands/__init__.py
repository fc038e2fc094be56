"""The commands `validate` and `article`."""
