"""Answers of a language model's service, with log-probabilities of the likeliest tokens; one record per question.

A record has `top_logprobs` for the token that answers the question: a list of {"token": …, "logprob": …}, or an object
of tokens and their log-probabilities. Alternatively the record is the service's whole response, which is searched for
it (`logprobs` or `choices`). The record also has `answer` (or `target`), the text of the right token. Tokens that
differ only in blanks are merged. The logits are the tokens' log-probabilities in descending order, followed by that of
all other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trueup._core.errors import InputError

_ANSWERS = ("answer", "target")
_MIN_REST = 1e-6
"""Smallest probability of all other tokens."""
_UNKNOWN_LOGPROB = -9000.0
"""Log-probabilities below this are unknown: services write −9999."""


def is_sample(record: Mapping[str, Any]) -> bool:
    """Return whether a record looks like an answer with log-probabilities.

    >>> is_sample({"top_logprobs": {"A": -0.1, "B": -3.0}, "answer": "A"}), is_sample({"answer": "A"})
    (True, False)
    """
    return "logits" not in record and any(name in record for name in _ANSWERS) and _find(record) is not None


def with_logits(record: Mapping[str, Any], width: int | None = None) -> dict[str, Any]:
    """Add `logits` (None fills them up to `width`, before the rest) and `label`, the index of the answer.

    >>> record = {"top_logprobs": [{"token": "A", "logprob": -0.5}, {"token": " B", "logprob": -1.5}], "answer": "B"}
    >>> sample = with_logits(record)
    >>> [round(x, 2) for x in sample["logits"]], sample["label"]
    ([-0.5, -1.5, -1.77], 1)
    """
    probs: dict[str, float] = {}
    for token, logprob in _pairs(_find(record)):
        probs[token] = probs.get(token, 0.0) + math.exp(logprob)
    if not probs:
        raise InputError("top_logprobs", "have at least one token", "none")
    total = sum(probs.values())
    if total > 1.01:
        raise InputError("top_logprobs", "be logarithms of probabilities that sum to at most 1", f"{total:.4g}")
    ordered = sorted(probs, key=lambda token: -probs[token])
    rest = max(1 - total, _MIN_REST)
    filled = [None] * ((width or 0) - len(ordered) - 1)
    answer = next(str(record[name]).strip() for name in _ANSWERS if name in record)
    label = ordered.index(answer) if answer in probs else len(ordered) + len(filled)
    logits = [*(math.log(probs[token] / (total + rest)) for token in ordered), *filled, math.log(rest / (total + rest))]
    return {"logits": logits, "label": label, **record}


def _find(record: Any) -> Any:
    """Find the log-probabilities of the first token, wherever a service puts them; None if there are none."""
    if not isinstance(record, Mapping):
        return None
    if isinstance(choices := record.get("choices"), list) and choices:
        return _find(choices[0])
    if isinstance(logprobs := record.get("logprobs"), Mapping):
        content = logprobs.get("content")
        return _find(content[0]) if isinstance(content, list) and content else _find(logprobs)
    top = record.get("top_logprobs")
    return top[0] if isinstance(top, list) and top and _is_list_of_tokens(top) else top


def _is_list_of_tokens(top: list[Any]) -> bool:
    """Return whether the list has the candidates of several tokens; the first is the answer's."""
    return isinstance(top[0], list) or (isinstance(top[0], Mapping) and "token" not in top[0])


def _pairs(top: Any) -> list[tuple[str, float]]:
    """Return tokens, without blanks around them, and log-probabilities."""
    entries = list(top.items()) if isinstance(top, Mapping) else top
    pairs = []
    for entry in entries if isinstance(entries, list) else [entries]:
        parts = (entry.get("token"), entry.get("logprob")) if isinstance(entry, Mapping) else entry
        token, logprob = parts if isinstance(parts, list | tuple) and len(parts) == 2 else ("", math.nan)
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not isinstance(token, str) or not is_number or math.isnan(logprob) or logprob > 1e-3:
            raise InputError("top_logprobs", "be tokens and their log-probabilities", repr(entry)[:60])
        if logprob > _UNKNOWN_LOGPROB:
            pairs.append((token.strip(), float(logprob)))
    return pairs
