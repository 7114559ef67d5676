"""The verbs that the studies add to the command line."""
