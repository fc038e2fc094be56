"""Training after pre-training: memory and time of each phase and role of a step, from the lists of operations that training has."""
