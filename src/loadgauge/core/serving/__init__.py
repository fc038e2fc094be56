"""A model that is only run forward: what it keeps, computes and sends, and the time of prompts and of tokens."""
