"""Samples logged by lm-evaluation-harness (`samples_*.jsonl`), with log-likelihoods of a question's options as logits.

A record has three fields. `target` is the number or the text of the right option. `filtered_resps` (or `resps`) has,
for each option, its log-likelihood and whether greedy decoding gives it. `arguments` has the prompt and each option's
text. softmax over the log-likelihoods is the model's probability of each option. Questions with fewer options than
others are filled up with absent ones, whose logits are −∞.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trueup._core.errors import InputError


def is_sample(record: Mapping[str, Any]) -> bool:
    """Return whether a record looks like a logged sample.

    >>> is_sample({"target": "1", "filtered_resps": [["-1.5", "False"], ["-0.5", "True"]]}), is_sample({"target": 1})
    (True, False)
    """
    return "target" in record and ("filtered_resps" in record or "resps" in record) and "logits" not in record


def with_logits(record: Mapping[str, Any], width: int | None = None) -> dict[str, Any]:
    """Add `logits`, one per option and filled up to `width` by None, and `label`, the right option.

    >>> sample = with_logits({"target": "1", "filtered_resps": [["-1.5", "False"], ["-0.5", "True"]]})
    >>> sample["logits"], sample["label"]
    ([-1.5, -0.5], 1)
    """
    scores = _scores(record)
    if "acc_mutual_info" in record and len(scores) % 2 == 0:
        scores = scores[: len(scores) // 2]  # the second half scores the options without the question
    label = _right_option(record, len(scores))
    return {"logits": [*scores, *[None] * ((width or 0) - len(scores))], "label": label, **record}


def _scores(record: Mapping[str, Any]) -> list[float]:
    responses = record.get("filtered_resps") or record.get("resps")
    scores = []
    for response in responses if isinstance(responses, list) else [responses]:
        while isinstance(response, list) and len(response) == 1:  # `resps` has a list of repeats around each
            response = response[0]
        try:
            score, _ = response if isinstance(response, list) else []
            scores.append(float(score))
        except (TypeError, ValueError):
            requirement = "be a log-likelihood and a flag for each option"
            hint = "only multiple-choice tasks have them, not generated text"
            raise InputError("filtered_resps", requirement, repr(response)[:60], hint) from None
    if len(scores) < 2:
        raise InputError("filtered_resps", "have at least 2 options", str(len(scores)))
    return scores


def _right_option(record: Mapping[str, Any], options: int) -> int:
    target = record["target"]
    text = str(target)
    if text.strip().isdecimal() and not isinstance(target, bool):
        if int(text) < options:
            return int(text)
    else:
        texts = _option_texts(record.get("arguments"))[:options]
        matching = [i for i, option in enumerate(texts) if option.strip() == text.strip()]
        if len(matching) == 1:
            return matching[0]
    raise InputError("target", f"be one of the {options} options", repr(target)[:60])


def _option_texts(arguments: Any) -> list[str]:
    """Return the options, from lists (prompt, option) or objects {"gen_args_0": {"arg_0": prompt, "arg_1": option}}."""
    entries = list(arguments.values()) if isinstance(arguments, dict) else arguments
    texts = []
    for entry in entries if isinstance(entries, list) else ():
        parts = list(entry.values()) if isinstance(entry, dict) else entry
        if not isinstance(parts, list) or len(parts) < 2 or not isinstance(parts[1], str):
            return []
        texts.append(parts[1])
    return texts
