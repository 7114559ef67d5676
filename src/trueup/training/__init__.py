"""Training networks that stay repairable: a plain loop, data sets, and what a run leaves behind."""
