"""The version, which files made by this package carry."""

__version__ = "0.1.0"
