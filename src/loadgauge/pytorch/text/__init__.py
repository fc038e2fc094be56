"""Traces, captures, measurements and errors of memory, in words."""
