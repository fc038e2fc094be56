"""The evidence in words."""
