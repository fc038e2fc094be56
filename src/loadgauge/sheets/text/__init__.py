"""Sweeps' answers and notebook views, in words."""
