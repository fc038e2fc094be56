"""Children begin with PyTorch imported."""

from warm_children import warm_children

__all__ = ["warm_children"]
