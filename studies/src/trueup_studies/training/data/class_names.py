"""Names of classes, in the order of the labels."""

from __future__ import annotations

from trueup_studies.grid import read_toml

_NAMES = {key: tuple(names) for key, names in read_toml(__package__, "class_names.toml").items()}
TEN = tuple("0123456789")
CLOTHES, THINGS, HUNDRED, CELLS = (_NAMES[key] for key in ("clothes", "things", "hundred", "cells"))
QUESTIONS, STARS, GROUPS = (_NAMES[key] for key in ("questions", "stars", "groups"))
