"""The answers of `loadgauge plan`."""
