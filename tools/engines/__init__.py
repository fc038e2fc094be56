"""Measured points of servers: read into `data/serving.csv.gz`, what engines reach fitted to them, and the page that scores it."""
