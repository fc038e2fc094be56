"""Input of a visitor: controls, dropped files, uploads."""
