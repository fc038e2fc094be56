"""Answers: the records that every command returns, their reasons, figures and equations."""
