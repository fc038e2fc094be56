"""Subjects of a trace: scripts, functions, expressions, jobs."""
