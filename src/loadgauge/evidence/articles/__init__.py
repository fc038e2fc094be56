"""Five articles on training large models, table by table: what they print, what is right, and why the two differ."""
