"""The core: what a job needs and takes, from its description alone. It imports no other room; they register with `base/hooks.py`."""
