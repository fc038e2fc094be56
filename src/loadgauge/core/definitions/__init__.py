"""What things are: model, layout, training, hardware. Frozen records, with no sums over them."""
