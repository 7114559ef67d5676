"""Answers of a language model's service with the log-probabilities of the likeliest tokens, as one record a question.

A record has `top_logprobs`, for the token that answers the question: a list of {"token": …, "logprob": …}, or an object
of tokens and their log-probabilities; or it is the service's whole response, in which that is looked for (`logprobs` or
`choices`). And it has `answer` (or `target`), the text of the right token. Tokens that differ by blanks are one. The
logits are the tokens' log-probabilities, the likeliest first, and last that of all other tokens together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trueup._core.errors import InputError

_ANSWERS = ("answer", "target")
_LEAST_REST = 1e-6
"""The least probability of all other tokens together."""
_NOT_TOLD = -9000.0
"""Services write −9999 for a log-probability that they do not tell."""


def is_sample(record: Mapping[str, Any]) -> bool:
    """Whether a record looks like an answer with log-probabilities.

    >>> is_sample({"top_logprobs": {"A": -0.1, "B": -3.0}, "answer": "A"}), is_sample({"answer": "A"})
    (True, False)
    """
    return "logits" not in record and any(name in record for name in _ANSWERS) and _find(record) is not None


def with_logits(record: Mapping[str, Any], width: int | None = None) -> dict[str, Any]:
    """The record with `logits`, filled up to `width` by None before the last, and `label`, the place of the answer.

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
    rest = max(1 - total, _LEAST_REST)
    filled = [None] * ((width or 0) - len(ordered) - 1)
    answer = next(str(record[name]).strip() for name in _ANSWERS if name in record)
    label = ordered.index(answer) if answer in probs else len(ordered) + len(filled)
    logits = [*(math.log(probs[token] / (total + rest)) for token in ordered), *filled, math.log(rest / (total + rest))]
    return {"logits": logits, "label": label, **record}


def _find(record: Any) -> Any:
    """The log-probabilities of the first token, wherever a service puts them; None where there are none."""
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
    """Whether it has the candidates of several tokens, of which the first is the answer's."""
    return isinstance(top[0], list) or (isinstance(top[0], Mapping) and "token" not in top[0])


def _pairs(top: Any) -> list[tuple[str, float]]:
    """Tokens without the blanks around them, and log-probabilities."""
    entries = list(top.items()) if isinstance(top, Mapping) else top
    pairs = []
    for entry in entries if isinstance(entries, list) else [entries]:
        parts = (entry.get("token"), entry.get("logprob")) if isinstance(entry, Mapping) else entry
        token, logprob = parts if isinstance(parts, list | tuple) and len(parts) == 2 else ("", math.nan)
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not isinstance(token, str) or not is_number or math.isnan(logprob) or logprob > 1e-3:
            raise InputError("top_logprobs", "be tokens and their log-probabilities", repr(entry)[:60])
        if logprob > _NOT_TOLD:
            pairs.append((token.strip(), float(logprob)))
    return pairs
