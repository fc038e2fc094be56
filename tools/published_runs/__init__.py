"""The published runs' tables, in their sources' words, and what writes the package's rows from them."""
