"""Why numbers are what they are: formulas, the run's own numbers put in, results and sources."""
