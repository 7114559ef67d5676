"""Which columns of a file are the logits and the labels, by the names that a user may give or leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from trueup.core.errors import Hint, InputError

_PROBABILITIES = re.compile(r"(.*_)?prob(s|_\d+)")


def find_columns(
    columns: Mapping[str, str], logits: str | Sequence[str], labels: str | None, probs: bool, split: str | None
) -> tuple[list[str], str | None]:
    """The names of the columns of logits, and of the labels if they are wanted; else an error lists what is there.

    >>> find_columns({"logit_0": "", "logit_1": "", "label": ""}, "logits", "labels", False, None)
    (['logit_0', 'logit_1'], 'label')
    """
    prefix = f"{split}_" if split else ""
    if isinstance(logits, str):
        # The array of a .npy file has no name of its own, so there `probs` alone says what it is.
        wanted = [prefix + name for name in (("probs", "logits") if probs and logits == "logits" else (logits,))]
        names = next(filter(None, (_numbered_columns(columns, name) for name in wanted)), [])
        missing = [] if names else wanted[:1]
    else:
        names = list(logits)
        missing = [name for name in names if name not in columns] if names else ["logits"]
    accepted = [] if labels is None else label_names(labels, split)
    label = next((name for name in accepted if name in columns), None)
    if missing or (accepted and label is None):
        missing += [] if label else accepted[:1]
        raise _missing(columns, missing, probs, split)
    if not probs and any(_PROBABILITIES.fullmatch(name) for name in names):
        raise InputError(names[0], "hold logits", "probabilities by its name", Hint.PROBS)
    return names, label


def label_names(labels: str, split: str | None) -> list[str]:
    """The names that labels may have.

    >>> label_names("labels", "val")
    ['val_labels', 'val_label']
    """
    prefix = f"{split}_" if split else ""
    return [prefix + name for name in (("labels", "label") if labels == "labels" else (labels,))]


def splits_in(columns: Mapping[str, str], labels: str = "labels") -> tuple[str | None, ...]:
    """The splits to read: val and test if a file has the labels of both, else its whole (None), else the one it has.

    >>> splits_in({"val_logits": "", "val_labels": "", "test_logits": "", "test_labels": ""})
    ('val', 'test')
    """

    def has(split: str | None) -> bool:
        return any(name in columns for name in label_names(labels, split))

    splits = tuple(split for split in ("val", "test") if has(split))
    return splits if len(splits) == 2 or (splits and not has(None)) else (None,)


def _numbered_columns(columns: Mapping[str, str], name: str) -> list[str]:
    """The array of that name, else one column a class: `logits` is also `logit_0`, `logit_1`, …, by number."""
    if name in columns:
        return [name]
    stem = re.escape(name.removesuffix("s"))
    matches = [match for column in columns if (match := re.fullmatch(rf"{stem}s?_(\d+)", column))]
    matches.sort(key=lambda match: int(match[1]))
    numbers = [int(match[1]) for match in matches]
    if numbers != list(range(len(numbers))):
        raise InputError(f"columns {matches[0].string} …", f"be numbered 0..{len(numbers) - 1}", _list(columns))
    return [match.string for match in matches]


def _missing(columns: Mapping[str, str], missing: Sequence[str], probs: bool, split: str | None) -> InputError:
    splits = [name.removesuffix("_labels") for name in columns if name.endswith("_labels")]
    hint = None
    if splits and not split:
        hint = Hint.SPLIT
    elif not probs and any(_PROBABILITIES.fullmatch(name) for name in columns):
        hint = Hint.PROBS
    elif "logits" in missing and any("confidence" in name.lower() for name in columns):
        hint = Hint.STATED
    elif "logits" in missing and {"mean", "std"} <= set(columns):
        hint = Hint.FORECAST
    choices = splits if hint is Hint.SPLIT else ()
    return InputError(
        "the file", f"have {' and '.join(missing)}", _list(columns), hint or _nearest(columns, missing), choices=choices
    )


def require_columns(columns: Mapping[str, str], names: Sequence[str]) -> None:
    """Columns that are there; else an error lists those that are, and the nearest name.

    >>> require_columns({"category": "", "correct": ""}, ["categroy"])
    Traceback (most recent call last):
        ...
    trueup.core.errors.InputError: the file must have categroy, got 'category', 'correct'; did you mean category?
    """
    missing = [name for name in names if name not in columns]
    if missing:
        raise InputError("the file", f"have {' and '.join(missing)}", _list(columns), _nearest(columns, missing))


def _nearest(columns: Mapping[str, str], missing: Sequence[str]) -> str | None:
    near = [match for name in missing for match in get_close_matches(name, columns, n=1, cutoff=0.7)]
    return f"did you mean {' and '.join(near)}?" if near else None


def _list(columns: Mapping[str, str], most: int = 12) -> str:
    words = [f"{name!r} {description}".strip() for name, description in columns.items()]
    more = f", … {len(words) - most} more" if len(words) > most else ""
    return (", ".join(words[:most]) or "nothing") + more
