"""The server behind `loadgauge serve`: every number of the page comes from here, and from the same code as the commands."""
