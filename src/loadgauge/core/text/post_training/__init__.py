"""Post-training in words."""
