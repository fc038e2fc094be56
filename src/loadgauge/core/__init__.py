"""The core: what a job needs and takes, from its description. Other rooms register in `base/hooks.py`."""
