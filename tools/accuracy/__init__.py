"""How far off the predictions are: efficiencies fitted to published runs, cross-validation, and the page of it."""
