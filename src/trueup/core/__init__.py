"""Private foundations: arrays, bins, one pass over logits, minimisers, splits. Everything else stands on them."""
