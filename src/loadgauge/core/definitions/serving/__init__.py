"""What is asked of an engine of inference, and what engines reach."""
