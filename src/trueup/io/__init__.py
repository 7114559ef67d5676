"""Files: predictions in five formats, artifacts of what was fitted, shards, and writes that are whole or not there."""
