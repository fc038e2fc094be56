"""Figures as SVG, PNG or PDF: the page's panels, drawn by matplotlib (extra `plot`)."""
