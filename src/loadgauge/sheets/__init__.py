"""Sheets: plots, sweeps over many jobs, and views in notebooks."""
