"""Chats: check their turns, render them by a template, and find the answers in the tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adloco_jax.errors import ConfigError, DataError, reason

Render: TypeAlias = Callable[[list[dict[str, Any]], bool], str]
"""`render(turns, prompts)`: the text of the turns; if `prompts`, with the start of an answer."""

ROLES = ("system", "user", "assistant")


class Answers(NamedTuple):
    """The parts of a chat's text that count.

    Attributes:
      spans: For each part the text before it, and the text to its end.
      num_bytes: Number of UTF-8 bytes of these parts, without what the template adds.
      only_last: Whether earlier answers do not count, because the template changes them later.
    """

    spans: Sequence[tuple[str, str]] = ()
    num_bytes: int = 0
    only_last: bool = False


def read(
    row: Mapping[str, Any], where: str, names: Sequence[str], render: Render | None, end: str
) -> tuple[str, Answers]:
    """Return the text of a chat, and its answers, from the columns `names` of a row.

    They are `messages`, or `prompt` and `completion`, of which only the latter's answers count; if
    both are text, `end` closes it.

    Raises:
      DataError: If a turn is malformed or has an unknown role, an answer is empty, or the template
        refuses the chat.
      ConfigError: If there is no template.
    """
    prompt, completion = row[names[0]], row[names[-1]]
    if len(names) == 2 and isinstance(prompt, str) and isinstance(completion, str):
        _require_answer(completion, f"{where}: {names[1]!r}")
        text = prompt + completion + end
        return text, Answers([(prompt, text)], num_bytes(completion))
    if render is None:
        need = "the tokenizer has no chat template; set data.template to a file with one"
        raise ConfigError(f"{where}: {need}")
    parts = [_turns(row[name], f"{where}: {name!r}") for name in names]
    turns, start = sum(parts, []), len(parts[0]) if len(parts) == 2 else 0
    at = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= start]
    try:
        text = render(turns, False)
        spans = [(render(turns[:i], True), render(turns[: i + 1], False)) for i in at]
    except Exception as error:  # deliberately broad, because templates are programs
        raise DataError(f"{where}: the chat template refuses it ({reason(error, 200)})") from error
    same = [all(map(text.startswith, span)) for span in spans]
    if only_last := not all(same):
        if not same[-1] and turns[-1]["role"] == "assistant":
            need = "starts an answer otherwise than it writes the last one; set data.template"
            raise DataError(f"{where}: the chat template {need} to another file")
        at, spans = (at[-1:], spans[-1:]) if same[-1] else ([], [])
    return text, Answers(spans, sum(num_bytes(turns[i]["content"]) for i in at), only_last)


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8; it may have half of a surrogate pair."""
    return len(text.encode(errors="replace"))


def _turns(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: have {given!r:.40}, need a list of turns")
    turns = []
    for number, turn in enumerate(given, 1):
        at = f"{where}, turn {number}"
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise DataError(f"{at}: have {turn!r:.60}, need 'role' and 'content', both text")
        if turn.get("role") not in ROLES:
            raise DataError(f"{at}: role {turn.get('role')!r:.40}, need one of {', '.join(ROLES)}")
        if turn["role"] == "assistant":
            _require_answer(turn["content"], at)
        # A table has all fields in every turn.
        turns.append({key: value for key, value in turn.items() if value is not None})
    return turns


def _require_answer(text: str, where: str) -> None:
    if not text.strip():
        raise DataError(f"{where}: an empty answer; leave such rows out")


def counted(ids: np.ndarray, spans: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Mark the tokens that count, bool like `ids`: those of spans (ids before it, ids to its end).

    Where two texts have a common beginning, so have their ids, but for a token across its end. The
    first token never counts, because nothing predicts it.
    """
    marks = np.zeros(len(ids), bool)
    for span in spans:
        marks[slice(*(_num_common(ids, part) for part in span))] = True
    marks[:1] = False
    return marks


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    return int(np.argmin(np.append(first[:length] == second[:length], False)))
