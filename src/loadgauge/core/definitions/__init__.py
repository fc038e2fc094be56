"""Definitions: model, layout, training, hardware, job. Frozen records, with no sums over them."""
