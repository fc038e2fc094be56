"""What is traced: scripts, functions, expressions, jobs."""
