"""What the OpenAPI description says of `POST /predict`."""

from __future__ import annotations

from typing import Any

__all__ = ["PREDICT", "PROBLEMS"]

_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_NUMBER = {"type": "number", "nullable": True}
_VERDICT = {
    "type": "object",
    "required": ["row", "verdict"],
    "properties": {
        "row": {"type": "integer", "description": "The number of the row in the request; the first is 1."},
        "verdict": {"type": "string", "enum": ["answer", "ask", "ood", "unreadable"]},
        "label": {"description": "The most probable class: its name, or its number where there are no names."},
        "confidence": {**_NUMBER, "description": "Its probability."},
        "prediction_set": {"type": "array", "description": "Classes that hold the label with the promised coverage."},
        "mean": {**_NUMBER, "description": "Of numbers, with std, and low and high, the ends of the interval."},
        "total": {**_NUMBER, "description": "Uncertainty: nats of classes, variance of numbers."},
        "aleatoric": {**_NUMBER, "description": "The part of it that the data leave open."},
        "epistemic": {**_NUMBER, "description": "The part of it that the model leaves open."},
        "p_value": {**_NUMBER, "description": "Of the input being a known one; small = OOD."},
        "reason": {"type": "string", "description": "Why, in one sentence."},
        "probs": {"type": "object", "description": "With ?probs=true: the probability of every class."},
        "error": {"type": "string", "description": "Why a row cannot be read."},
    },
}
_TENSORS = {
    "type": "object",
    "description": "Tensors, {inputs: [...]}, with an entry for each example, or names of tensors; or rows of a "
    "table or texts, {rows: [{...}]}, where the guard was made from files.",
    "properties": {"inputs": {}, "rows": {"type": "array", "items": {"type": "object"}}},
}
_IMAGE = {"type": "string", "format": "binary"}

PREDICT: dict[str, Any] = {
    "parameters": [
        {
            "name": "probs",
            "in": "query",
            "required": False,
            "schema": {"type": "boolean", "default": False},
            "description": "Whether to give the probability of every class.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _TENSORS},
            "image/png": {"schema": _IMAGE},
            "image/jpeg": {"schema": _IMAGE},
        },
    },
}


def _problem(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ERROR}}}


_ANSWER = {"type": "object", "required": ["verdicts"], "properties": {"verdicts": {"type": "array", "items": _VERDICT}}}

PROBLEMS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A verdict for each row.", "content": {"application/json": {"schema": _ANSWER}}},
    401: _problem("The token is missing or wrong."),
    408: _problem("The body did not arrive in time."),
    413: _problem("The body, the image or the number of rows is too large."),
    415: _problem("The content type is not read."),
    422: _problem("The body cannot be read, or the network cannot take the inputs."),
    503: _problem("The queue is so long that the request would be late: try again after Retry-After seconds."),
    504: _problem("The request was let in and not decided in time."),
}
