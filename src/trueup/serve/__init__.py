"""The web page and its API: drop a file of predictions, see how honest they are, take the repair home."""
