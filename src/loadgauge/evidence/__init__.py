"""Evidence: predictions beside published runs, and the five articles' tables recomputed."""
