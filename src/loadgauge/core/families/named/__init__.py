"""Names of models that others give them."""
