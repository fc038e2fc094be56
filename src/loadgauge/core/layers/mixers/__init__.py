"""Linear mixers: Mamba, delta nets, lightning attention, convolutions."""
