"""Ours beside the published results of the CalArena benchmark."""
