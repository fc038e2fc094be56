"""Plans, and answers to inverse questions, in words."""
