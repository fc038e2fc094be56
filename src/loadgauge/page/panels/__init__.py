"""Data of each panel of the page."""
