"""What the tests of all verbs use."""

from command_fixtures import asked, command, draw, folder

__all__ = ["asked", "command", "draw", "folder"]
