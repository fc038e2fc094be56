"""An estimate in words."""
