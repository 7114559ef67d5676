"""Our methods compared with the published results of the CalArena benchmark."""
