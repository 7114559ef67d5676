"""Neural Clamping: an input shift and a temperature, learned together."""
