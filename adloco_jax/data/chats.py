"""Chats: check their turns, render them by a template, and find the answers in the text."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError, reason
from adloco_jax.settings import DataSettings

Turn: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]  # the first character of a part of a text, and the one behind it

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's
_ANSWER = "an answer that is not empty; mend it, or set data.skip_bad"
_ASKED: Turn = {"role": "user", "content": "\ue000"}  # a question that no chat has


class Answers(NamedTuple):
    """The parts of a chat's text that count.

    Attributes:
      spans: The parts, in order.
      num_bytes: Number of UTF-8 bytes of these parts, without the ends of answers.
      only_last: Whether earlier answers do not count, because the template changes them later.
      is_rejected: Whether nothing counts because the row's `label` is false, as KTO's.
      unread: Names of columns, and of fields of turns, that neither this module nor the template
        reads.
    """

    spans: Sequence[Span] = ()
    num_bytes: int = 0
    only_last: bool = False
    is_rejected: bool = False
    unread: frozenset[str] = frozenset()


def read(
    row: Mapping[str, Any], where: str, data: DataSettings, tokenizer: Tokenizer
) -> tuple[str, Answers]:
    """Return the text of a chat, and its answers, from the columns that `data` names.

    They are one column of turns, or `prompt` and `completion`, of which only the latter's answers
    count; if both are text, the end of text closes it. Turns of `weight` 0 do not count.

    Raises:
      DataError: If a turn is malformed or has an unknown role, an answer is empty, or the template
        refuses the chat.
      ConfigError: If there is no template.
    """
    names, end = data.text_column.split("+"), tokenizer.decode([tokenizer.eot_id])
    ends = [end, *(tokenizer.decode([i]) for i in (*tokenizer.ends, *tokenizer.turn_end))]
    columns, label = [row[name] for name in names], _as_bool(row.get("label"))
    if all(map(_is_chat, parsed := [*map(_parsed, columns)])):
        columns = parsed
    tools = row.get("tools") if tokenizer.reads("tools") else None
    known = {*names, *["tools"] * bool(tools), *["label"] * (label is not None)}
    unread = {name for name, value in row.items() if value is not None} - known
    _require(None not in columns, f"{where}: {data.text_column!r}", columns, "text or turns")
    if len(names) == 2 and all(isinstance(column, str) for column in columns):
        prompt, completion = columns
        bare = without_end(completion, ends)
        _require(bare.strip(), f"{where}: {names[1]!r}", completion, _ANSWER)
        text = prompt + without_end(completion, [end]) + end
        answers = Answers([(len(prompt), len(text))], num_bytes(bare))
    elif tokenizer.render is None:
        need = "the tokenizer has no chat template; set data.template to a file with one"
        raise ConfigError(f"{where}: {need}")
    else:
        parts = [
            _turns(column, f"{where}: {name!r}", tokenizer, ends)
            for name, column in zip(names, columns, strict=True)
        ]
        turns, start = sum(parts, []), len(parts[0]) if len(parts) == 2 else 0
        at = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= start]
        at = [i for i in at if turns[i].get("weight", 1)]
        turns = [{key: turn[key] for key in turn if key != "weight"} for turn in turns]
        unread |= {f"{k} of turns" for turn in turns for k in turn if not tokenizer.reads(k)}
        tools = _objects(_parsed(tools), f"{where}: 'tools'") if tools else None
        try:
            text, spans, only_last = _rendered(turns, at, tools, tokenizer)
        except Exception as error:  # deliberately broad, because templates are programs
            why = f"the chat template refuses it ({reason(error, 200)})"
            raise DataError(f"{where}: {error if isinstance(error, DataError) else why}") from error
        size = sum(num_bytes(without_end(text[a:b], ends)) for a, b in spans)
        answers = Answers(spans, size, only_last)
    if data.loss == "all":
        answers = Answers([(0, len(text))], num_bytes(text))
    if label is False:
        answers = Answers(is_rejected=True)
    return text, answers._replace(unread=frozenset(unread))


def without_end(text: str, ends: Collection[str]) -> str:
    """Return a text without the ends of text that stand at its end, as another will follow."""
    while end := next((end for end in ends if end and text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8; it may have half of a surrogate pair."""
    return len(text.encode(errors="replace"))


# -- Rows and turns --------------------------------------------------------------------------


def _parsed(value: Any) -> Any:
    """Return the JSON list or object that a text holds; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else [None]
    return all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)


def _as_bool(label: Any) -> bool | None:
    text = str(label).strip().lower().removesuffix(".0")  # tables have numbers and text
    return {"true": True, "1": True, "false": False, "0": False}.get(text)


def _require(fits: Any, where: str, have: Any, need: str) -> None:
    if not fits:
        raise DataError(f"{where}: have {have!r:.80}, need {need}")


def _objects(given: Any, where: str) -> list[dict[str, Any]]:
    objects = [_parsed(each) for each in given] if isinstance(given, list) else [given]
    _require(all(isinstance(e, dict) for e in objects), where, given, "a list of objects")
    return objects


def _turns(given: Any, where: str, tokenizer: Tokenizer, ends: Collection[str]) -> list[Turn]:
    _require(isinstance(given, list) and given != [], where, given, "a list of turns")
    return [
        _turn(_parsed(t), f"{where}, turn {n}", tokenizer, ends) for n, t in enumerate(given, 1)
    ]


def _turn(given: Any, at: str, tokenizer: Tokenizer, ends: Collection[str]) -> Turn:
    _require(isinstance(given, dict), at, given, "an object with 'role' and 'content'")
    turn = {key: value for key, value in given.items() if value is not None}
    for other, key in (("from", "role"), ("value", "content")):  # ShareGPT's
        if other in turn and key not in turn:
            turn[key] = turn.pop(other)
    role, weight, parts = turn.get("role"), turn.get("weight", 1), turn.get("content")
    known = isinstance(role, str) and role in _ROLES
    _require(known, at, given, f"a role, one of {', '.join(_ROLES)}")
    _require(weight in (0, 1), at, given, "a weight of 0 or 1")
    turn["role"] = _ROLES[str(role)]
    if "tool_calls" in turn:
        turn["tool_calls"] = _calls(turn["tool_calls"], f"{at}: 'tool_calls'")
    calls = turn.get("tool_calls") if tokenizer.reads("tool_calls") else None
    if isinstance(parts, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        is_text = all(isinstance(text, str) for text in texts)
        turn["content"] = "".join(map(str, texts)) if is_text else parts
    if turn.get("tool_calls") and not (calls or parts) and weight:
        _require(False, at, given, "content, or a data.template that writes 'tool_calls'")
    text = turn.get("content", "" if calls else None)
    _require(isinstance(text, str), at, given, "a 'content' that is text, or parts of text")
    if turn["role"] == "assistant" and "content" in turn:
        turn["content"] = without_end(turn["content"], ends)
        _require(calls or not weight or turn["content"].strip(), at, given, _ANSWER)
    return turn


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return calls of tools with arguments as objects, which templates write as JSON."""
    calls = []
    for call in _objects(_parsed(given), where):
        function = call.get("function")
        target = function if isinstance(function, dict) else call
        if isinstance(arguments := target.get("arguments"), str):
            target = target | {"arguments": _parsed(arguments)}
            fits = isinstance(target["arguments"], dict)
            _require(fits, where, arguments, "arguments that are a JSON object")
        calls.append(call | {"function": target} if isinstance(function, dict) else target)
    return calls


# -- Answers ---------------------------------------------------------------------------------


def _rendered(
    turns: list[Turn], at: list[int], tools: list | None, tokenizer: Tokenizer
) -> tuple[str, list[Span], bool]:
    """Return a chat's text, and its parts that the turns at the indices `at` have written.

    The template marks these parts. If not, a turn's part is what the template writes behind the
    start of an answer if this turn is the last. If it writes one of them otherwise once others
    follow, only the last answer is returned, and True.
    """
    render = tokenizer.render
    assert render is not None
    text = render(turns, False, tools)
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    if tokenizer.mark:
        marks = tokenizer.mark(turns, tools)
        if len(marks) != len(answers) and at != answers:
            raise DataError(
                f"the chat template marks {len(marks)} parts of {len(answers)} turns of the"
                " assistant, so it is not known which to leave out"
            )
        chosen = (
            marks
            if at == answers
            else [mark for i, mark in zip(answers, marks, strict=True) if i in at]
        )
        return text, chosen, False
    spans = [_written(text, turns, i, tools, tokenizer) for i in at]
    if spans and spans[-1] is None and at[-1] == len(turns) - 1:
        need = "starts an answer otherwise than it writes the last one; set data.template"
        raise DataError(f"the chat template {need} to another file")
    if None in spans:
        return text, [span for span in spans[-1:] if span], True
    return text, [span for span in spans if span], False


def _written(
    text: str, turns: list[Turn], i: int, tools: list | None, tokenizer: Tokenizer
) -> Span | None:
    """Find in a chat's text what the turn at index `i` has written; None if it is changed later."""
    render = tokenizer.render
    assert render is not None
    asked = [] if i else [_ASKED]  # before the first turn, because there may be no empty chat
    before = render([*asked, *turns[:i]], True, tools)
    whole = render([*asked, *turns[: i + 1]], False, tools)
    written = _without_space(whole.removeprefix(before), tokenizer)
    start = len(before) if i else max(0, text.find(written))
    is_same = text.startswith(written, start) and (text.startswith(before) or not i)
    return (start, start + len(written)) if is_same and whole.startswith(before) else None


def _without_space(written: str, tokenizer: Tokenizer) -> str:
    """Return an answer without the white space behind a token that ends it."""
    text = written.rstrip()
    return text if text.endswith(tokenizer.special) else written


def counted(offsets_N2: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens that count, bool [N]: those with a character in one of the spans.

    `offsets_N2` has the first character of each token, and the one behind it. The first token never
    counts, because nothing predicts it.
    """
    marks = np.zeros(len(offsets_N2), bool)
    # A token without characters may have any offsets.
    starts_N, ends_N = np.maximum.accumulate(offsets_N2, axis=0).T
    for start, end in spans:
        marks[np.searchsorted(ends_N, start, "right") : np.searchsorted(starts_N, end)] = True
    marks[:1] = False
    return marks
