"""Colours that everybody can tell apart, and what they stand for in every drawing.

The eight colours of Okabe and Ito, "Color universal design" (2008). Colour never speaks alone: markers, dashes and
hatches say the same.
"""

from __future__ import annotations

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#8C8C8C"
"""Not of the eight: for what is beside the point, such as the diagonal."""

SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""In the order in which curves take them; without yellow, which is lost on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-",
    (0, (4.0, 1.5)),
    (0, (1.0, 1.2)),
    (0, (5.0, 1.5, 1.0, 1.5)),
    (0, (3.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
    (0, (7.0, 2.0)),
    (0, (2.0, 2.0)),
)
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "||||", "----")
"""One a colour of `SERIES`, as are markers and dashes, in matplotlib's words."""

RIGHT = BLUE
WRONG = VERMILION
OVERCONFIDENT = VERMILION
"""The network says more than is true."""
UNDERCONFIDENT = SKY
BETTER = GREEN
WORSE = VERMILION
IDEAL = GREY
"""What a perfect network would do."""
