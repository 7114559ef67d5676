"""The changed camera as a section of the report."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from trueup.demo import camera, words
from trueup.demo.camera import Shifted
from trueup.demo.pictures import Repairs
from trueup.report.html import escape, paragraph, table
from trueup.report.labels import label

TITLE = "What if the camera changes?"


def camera_html(found: Sequence[Shifted], record: Repairs, picture: bytes) -> str:
    """The images as the changed camera shows them, a PNG file, and what each way of calibrating makes of them."""
    source = f"data:image/png;base64,{b64encode(picture).decode('ascii')}"
    parts = [
        paragraph(words.CAMERA),
        '<figure><div class="scroll" role="region" aria-label="Digits and their repair" tabindex="0">'
        f'<img alt="{escape(told(record))}" src="{source}" style="width:100%;min-width:40rem"></div>'
        f'<figcaption class="words">{escape(words.CAPTION)}</figcaption></figure>',
    ]
    for each in found:
        head, *rows = words.camera_rows(each)
        head = [head[0].capitalize(), *map(label, camera.METRICS)]
        name = each.corruption.capitalize()
        parts += [f"<h3>{escape(name)}</h3>", paragraph(words.setting(each)), table(name, head, rows)]
        parts.append(paragraph(f"{words.camera_verdict(each)} {words.earned(each)}"))
    return "".join(parts)


def told(record: Repairs) -> str:
    """The picture in words, for those who do not see it.

    >>> import numpy as np
    >>> from trueup.demo.pictures import Strip
    >>> strip = Strip("clean", np.zeros((2, 8, 8)), np.array([3, 1]), np.array([0.9, 0.7]), np.array([True, False]))
    >>> told(Repairs((strip,), 0.0))
    'Of the 2 digits shown, the network knows: clean 1.'
    """
    counts = ", ".join(f"{strip.name} {int(strip.right.sum())}" for strip in record.strips)
    return f"Of the {len(record.strips[0].images)} digits shown, the network knows: {counts}."
