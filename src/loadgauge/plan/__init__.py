"""The search: every valid layout at once, through the array reading of the list of operations."""
