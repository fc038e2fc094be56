"""The server: routes, processes, limits."""
