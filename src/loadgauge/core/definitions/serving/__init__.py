"""Inference: requests, engines, and the speed that engines reach."""
