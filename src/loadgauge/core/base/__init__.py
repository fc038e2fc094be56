"""Errors, units, algebra, sources, files and data: what every folder uses and none of which knows a model."""
