"""Every post-hoc method on every file of logits."""
