"""Runs on a fleet, in words."""
