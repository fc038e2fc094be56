"""What a visitor gives: controls, dropped files, uploads."""
