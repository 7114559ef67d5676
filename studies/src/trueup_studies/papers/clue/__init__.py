"""CLUE: training for uncertainty that equals the error."""
