"""Chats: check their turns, render them by a template, and find the answers in the text.

A *chat* is a list of *turns*, dicts with a "role" and a "content" or calls of tools. A *chat
template*, a program of the tokenizer, writes them as one text (`Tokenizer.render`), or raises an
error of any class, which `read` turns into a DataError. An *answer* is a turn of the role
"assistant"; its *span* is the part of the text that the template writes for it. The model learns to
write the spans: their tokens *count*. With `data.loss=all` every token counts. An *end of text* is
a special token's text, such as `<|im_end|>`; `ends` are those that may stand after an answer. A
*call* names a tool, a function, with its arguments. A *field* is a key of a turn.
`render(turns, prompts=False)` writes the turns alone; with `prompts=True` the start of an answer
follows them. Messages name a place (`where`): file and row, and then column and turn.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError, UserError, reason
from adloco_jax.settings import DataSettings

Turn: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]  # the first character of a part of a text, and the one after it

# Columns that are read beside those that data.text_column names.
BESIDE = ("tools", "label", "system", "input")
# The names of roles in files, with those that templates know.
_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",  # ShareGPT's
    "gpt": "assistant",
    "function_call": "assistant",  # LLaMA-Factory's
    "observation": "tool",
}
_ANSWER = "an answer that is not empty; mend it, or set data.skip_bad"  # the end of messages
# The start of turns that were written as Python's text of a list, with single quotes.
_PYTHON_TURNS = re.compile(r"""\s*\[\s*\{\s*'(role|from|content|value)'""")
# A question before a first answer, and a mark after contents. Their characters are from Unicode's
# area for private use, which no chat has.
_ASKED: Turn = {"role": "user", "content": "\ue000"}
_MARK = "\ue001"
_MAX_END_CHARS = 100  # of white space and the name of a special token after an answer
# An answer among the first turns is found by rendering all turns before it. For all answers of a
# long chat this would take quadratic time.
_FIRST_TURNS = 8


class Answers(NamedTuple):
    """The parts of a chat's text that count, and the text's tokens.

    Attributes:
      spans: The parts whose tokens count in the loss, in order: the answers, or with
        `data.loss=all` the whole text.
      contents: The same parts without the ends of text after answers.
      ids: The ids of the whole text, int32 [N].
      offsets: The index of each token's first character and the one after its last, [N, 2].
      only_last: Whether the last answer alone counts, because the template writes earlier ones
        differently once other turns follow.
      is_rejected: Whether nothing counts because the row's column `label` says false: then its
        answer is an example of a bad one, as in KTO's data.
      unread: Names of columns, and of fields of turns, that neither this module nor the template
        reads.
    """

    spans: Sequence[Span] = ()
    contents: Sequence[Span] = ()
    ids: np.ndarray = np.empty(0, np.int32)
    offsets: np.ndarray = np.empty((0, 2), np.int64)
    only_last: bool = False
    is_rejected: bool = False
    unread: frozenset[str] = frozenset()


class _Chat(NamedTuple):
    """A chat as a template renders it.

    Attributes:
      where: File and row, for messages.
      turns: The turns, with the names of roles and fields that templates know.
      answers: Indices of the turns whose answers count, ascending.
      tools: Descriptions of the tools, as templates expect them; None if there are none.
    """

    where: str
    turns: list[Turn]
    answers: list[int]
    tools: list | None


def read(
    row: Mapping[str, Any], where: str, data: DataSettings, tokenizer: Tokenizer
) -> tuple[str, Answers]:
    """Return the text of a row's chat, and its answers.

    `data.text_column` names one column of turns; or "prompt+completion", columns of turns or of
    text, of which only answers in the completion count; or "instruction+output", a question and its
    answer. If prompt and completion are text, they are joined without a template, and an end of
    text closes them. Turns of `weight` 0 do not count, nor do answers after the end of a row.

    Args:
      row: The values of a row by column; those of `data.text_column` are there.
      where: File and row, for messages.
      data: The config's group `data`.
      tokenizer: The run's tokenizer.

    Raises:
      DataError: If a column has no text or turns, a turn is malformed or has an unknown role, an
        answer is empty, or the template refuses the chat or writes its answers so that they cannot
        be found.
      ConfigError: If a chat needs a template, and the tokenizer has none.
    """
    names = data.text_column.split("+")
    columns = _columns(row, names, where)  # their values, in which turns are lists
    # The texts that may stand after an answer; the first is what ends a document. One is empty if
    # the tokenizer has no text for an id, and is then passed over.
    end_ids = (tokenizer.eot_id, *tokenizer.ends, *tokenizer.turn_end)
    ends = [tokenizer.decode([end_id]) for end_id in end_ids]
    end = ends[0]
    column = f"{where}: {data.text_column!r}"
    label = _as_bool(row.get("label"))
    only_last = False
    known = set(names)  # the columns that are read
    if label is not None:  # with other values the column is not read
        known.add("label")

    # Write the text, and find the spans of its answers. `unread` are names of fields of turns.
    if names == ["prompt", "completion"] and all(isinstance(text, str) for text in columns):
        prompt, completion = columns
        bare = without_end(completion, ends)  # an end of text alone is no answer
        _require(bare.strip(), f"{where}: {names[1]!r}", completion, _ANSWER)
        completion = without_end(completion, [end]) + end  # exactly one, also if it had one
        text = require_text(prompt + completion, column)
        ids, offsets = tokenizer.encode_aligned(text)
        spans = [(len(prompt), len(text))]
        unread = set()  # there are no turns
    elif tokenizer.render is None:
        need = "the tokenizer has no chat template; set data.template to a file with one"
        raise ConfigError(f"{where}: {need}")
    else:
        chat, beside = _chat_of_row(row, names, columns, where, tokenizer, ends)
        known.update(beside)
        fields: set[str] = set()
        for turn in chat.turns:
            fields.update(turn)
        unread = {f"{field} of turns" for field in fields if not tokenizer.reads(field)}
        try:
            text = require_text(_rendered(chat, tokenizer, ends), column)
            ids, offsets = tokenizer.encode_aligned(text)
            limit = len(text)  # where the text ends in a row, in characters
            if len(ids) > data.sequence_length + 1:  # longer than a row
                limit = int(offsets[data.sequence_length, 1])
            spans, only_last = _spans(text, chat, limit, tokenizer)
        except UserError:  # of this module, and clear already
            raise
        except Exception as error:  # deliberately broad, because templates are programs
            why = f"the chat template refuses it ({reason(error, limit=200)})"
            raise DataError(f"{where}: {why}") from error
        spans = [_with_end(text, span, ends) for span in spans]  # the model learns to stop there

    # Choose what counts. A rejected chat has no span, and is returned so that reports tell how many
    # there are.
    contents = []
    for start, stop in spans:
        contents.append((start, start + len(without_end(text[start:stop], ends))))
    if data.loss == "all":
        spans = [(0, len(text))]
        contents = spans
        only_last = False
    is_rejected = label is False
    if is_rejected:
        spans = []
        contents = []
        only_last = False

    # A column without a value in this row is not missed.
    filled = {name for name, value in row.items() if value is not None}
    unread.update(filled - known)
    answers = Answers(
        spans=spans,
        contents=contents,
        ids=ids,
        offsets=offsets,
        only_last=only_last,
        is_rejected=is_rejected,
        unread=frozenset(unread),
    )
    return text, answers


def require_text(text: Any, where: str) -> str:
    """Return `text`; raise DataError, which names the place `where`, if it is not Unicode text.

    JSON may hold half of a surrogate pair, which is not. A text with NUL characters is refused,
    too: it may be of a file that was cut.
    """
    need = "need Unicode text; leave it out"
    if not isinstance(text, str):
        raise DataError(f"{where}: have {text!r:.40}, {need}")
    bad = re.search("[\0\ud800-\udfff]", text)
    if bad:
        raise DataError(f"{where}: have {bad[0]!r} at character {bad.start()}, {need}")
    return text


def without_end(text: str, ends: Collection[str]) -> str:
    """Return a text without the ends of text (`ends`) at its end, and the space after them.

    A text that ends with none of them is returned as it is, with its space.
    """
    while True:
        bare = text.rstrip()
        # An empty end, which a tokenizer gives for an id without text, stands everywhere.
        found = [end for end in ends if end and bare.endswith(end)]
        if not found:
            return text
        text = bare.removesuffix(found[0])


def num_bytes(text: str, contents: Iterable[Span], limit: int) -> int:
    """Return the number of UTF-8 bytes in those parts of a text before the character `limit`.

    `contents` are the parts, of which one may go beyond the limit.
    """
    return sum(len(text[start : min(end, limit)].encode()) for start, end in contents)


# -- Rows and turns --------------------------------------------------------------------------


def _columns(row: Mapping[str, Any], names: Sequence[str], where: str) -> list[Any]:
    """Return the values of a row's columns `names`, those with turns as lists of turns.

    Tables often have turns as JSON text. It is parsed if all columns then are lists of turns; else
    the values are returned as they are. Raises DataError if a value is None, or has turns as
    Python's text instead of JSON.
    """
    columns = [row[name] for name in names]
    _require(None not in columns, f"{where}: {'+'.join(names)!r}", columns, "text or turns")
    for name, column in zip(names, columns, strict=True):
        if isinstance(column, str) and _PYTHON_TURNS.match(column):
            need = "turns as JSON (json.dumps writes it, str does not)"
            raise _fault(f"{where}: {name!r}", column, need)
    parsed = [_parsed_json(column) for column in columns]
    if all(is_chat(column) for column in parsed):
        return parsed
    return columns


def _chat_of_row(
    row: Mapping[str, Any],
    names: Sequence[str],
    columns: Sequence[Any],
    where: str,
    tokenizer: Tokenizer,
    ends: Collection[str],
) -> tuple[_Chat, set[str]]:
    """Return the chat of a row, and the names of further columns that were read for it.

    Args:
      row: The values of the row by column.
      names: The columns that `data.text_column` names, one or two.
      columns: Their values, from `_columns`.
      where: File and row, for messages.
      tokenizer: Its template tells which fields are read.
      ends: Ends of text, which are removed after answers, as the template writes its own.

    Raises:
      DataError: If a turn is malformed or has an unknown role, an answer is empty, or another
        column that is read has the wrong type.
    """
    beside = set()
    columns = list(columns)
    if names == ["instruction", "output"]:  # Alpaca's: two texts, which become a turn each
        asked = row.get("input")
        _require(isinstance(asked, str | None), f"{where}: 'input'", asked, "text")
        question = require_text(columns[0], f"{where}: {names[0]!r}")
        if asked is not None:
            beside.add("input")
        if asked:
            question += "\n" + asked
        columns[0] = [{"role": "user", "content": question}]
        columns[1] = [{"role": "assistant", "content": columns[1]}]

    turns: list[Turn] = []
    first_answer = 0  # index of the first turn that may count: of two columns, the second's first
    for name, column in zip(names, columns, strict=True):
        first_answer = len(turns)
        turns += _checked_turns(column, f"{where}: {name!r}", tokenizer, ends)
    answers = []
    for i, turn in enumerate(turns):
        counts = turn.pop("weight", 1) != 0  # templates do not know this field
        if turn["role"] == "assistant" and i >= first_answer and counts:
            answers.append(i)

    system = row.get("system")
    if system and turns[0]["role"] != "system":  # LLaMA-Factory's column of a first turn
        _require(isinstance(system, str), f"{where}: 'system'", system, "text")
        turns.insert(0, {"role": "system", "content": system})
        answers = [i + 1 for i in answers]  # all turns have moved by one
        beside.add("system")

    tools = row.get("tools")
    if tools and tokenizer.reads("tools"):  # the template writes them
        beside.add("tools")
        tools = _list_of_objects(_parsed_json(tools), f"{where}: 'tools'")
        if names == ["conversations"]:  # LLaMA-Factory's are bare descriptions of functions
            tools = [_with_type(tool) for tool in tools]
    else:
        tools = None
    return _Chat(where, turns=turns, answers=answers, tools=tools), beside


def _parsed_json(value: Any) -> Any:
    """Return the list or object that a value holds as JSON text; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # it only looks like JSON, or is nested too deeply
            return value
    return value


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of dicts with a role, or an empty list."""
    if not isinstance(value, list):
        return False
    return all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in value)


def _as_bool(label: Any) -> bool | None:
    """Return a label as a bool; None if it is missing, or neither true nor false."""
    # Tables may have it as a number or text: 1.0, "True".
    text = str(label).strip().lower().removesuffix(".0")
    return {"true": True, "1": True, "false": False, "0": False}.get(text)


def _require(fits: Any, where: str, have: Any, need: str) -> None:
    """Raise DataError unless `fits` is true: it says that `where` has `have`, and needs `need`."""
    if not fits:
        raise _fault(where, have, need)


def _fault(where: str, have: Any, need: str) -> DataError:
    """Return an error whose message shows what stands at the place `where`, and what is needed.

    `have` is the value at this place, of which the message has up to 80 characters.
    """
    return DataError(f"{where}: have {have!r:.80}, need {need}")


def _list_of_objects(given: Any, where: str) -> list[dict[str, Any]]:
    """Return `given` as a list of objects: it is such a list, or a single object.

    Members of the list may be JSON text. Raises DataError, which names the place `where`, if one is
    no object.
    """
    objects = [given]
    if isinstance(given, list):
        objects = [_parsed_json(item) for item in given]
    _require(all(isinstance(item, dict) for item in objects), where, given, "a list of objects")
    return objects


def _checked_turns(
    given: Any, where: str, tokenizer: Tokenizer, ends: Collection[str]
) -> list[Turn]:
    """Return the turns of a column, with the names of roles and fields that templates know.

    `where` is the column, for messages, and `ends` are ends of text, which are removed after
    answers. Raises DataError if `given` is not a list or is empty, or a turn is malformed.
    """
    _require(isinstance(given, list) and given != [], where, given, "a list of turns")
    return [
        _checked_turn(_parsed_json(turn), f"{where}, turn {number}", tokenizer, ends)
        for number, turn in enumerate(given, 1)
    ]


def _checked_turn(given: Any, at: str, tokenizer: Tokenizer, ends: Collection[str]) -> Turn:
    """Check a turn, and return it with the names of roles and fields that templates know.

    ShareGPT's names are replaced, parts of text joined to a content, and ends of text (`ends`)
    after an answer removed. A field of None is left out. The field "weight" stays; with the weight
    0 a turn does not count. `at` is the place of the turn in messages. Raises DataError if the turn
    is malformed, or if an answer that counts is empty.
    """
    _require(isinstance(given, dict), at, given, "an object with 'role' and 'content'")
    turn = {key: value for key, value in given.items() if value is not None}
    for other, key in (("from", "role"), ("value", "content")):  # ShareGPT's
        if other in turn and key not in turn:
            turn[key] = turn.pop(other)

    role = turn.get("role")
    weight = turn.get("weight", 1)
    is_known = isinstance(role, str) and role in _ROLES
    _require(is_known, at, given, f"a role, one of {', '.join(_ROLES)}")
    _require(weight in (0, 1), at, given, "a weight of 0 or 1")
    turn["role"] = _ROLES[str(role)]  # `str` only tells the type checker that it is one
    if role == "function_call":  # its content is the calls, as JSON
        calls = _list_of_objects(_parsed_json(turn.pop("content", None)), f"{at}: a function_call")
        turn["tool_calls"] = [_with_type(call) for call in calls]
    if "tool_calls" in turn:
        turn["tool_calls"] = _checked_calls(turn["tool_calls"], f"{at}: 'tool_calls'")

    # A content may be a list of parts, which are texts, or dicts with a "text". Join them.
    content = turn.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if all(isinstance(text, str) for text in texts):  # else the check below refuses the list
            turn["content"] = "".join(map(str, texts))

    # A turn needs a content, or calls that the template writes.
    has_calls = bool(turn.get("tool_calls"))
    writes_calls = has_calls and tokenizer.reads("tool_calls")
    if has_calls and not writes_calls and not content and weight:  # the turn would be empty
        raise _fault(at, given, "content, or a data.template that writes 'tool_calls'")
    if "content" in turn or not writes_calls:
        is_text = isinstance(turn.get("content"), str)
        _require(is_text, at, given, "a 'content' that is text, or parts of text")

    if turn["role"] == "assistant" and "content" in turn:
        turn["content"] = without_end(turn["content"], ends)
        has_answer = writes_calls or bool(turn["content"].strip())
        _require(has_answer or not weight, at, given, _ANSWER)
    return turn


def _checked_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of calls of tools, in which "arguments" that are JSON text become objects.

    A call has its "name" and "arguments", or an object "function" with both. Templates write the
    arguments as JSON themselves. Raises DataError, which names the place `where`, for others.
    """
    calls = []
    for call in _list_of_objects(_parsed_json(given), where):
        function = call.get("function")
        is_nested = isinstance(function, dict)  # the name and arguments stand within "function"
        target = function if is_nested else call  # the dict with the arguments
        arguments = target.get("arguments")
        if isinstance(arguments, str):
            target = target | {"arguments": _parsed_json(arguments)}
            fits = isinstance(target["arguments"], dict)
            _require(fits, where, arguments, "arguments that are a JSON object")
        if is_nested:
            target = call | {"function": target}
        calls.append(target)
    return calls


def _with_type(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function's description, or a call of one, within an object of type "function".

    Templates know this form, which is OpenAI's. An object that has it is returned as it is.
    """
    if "function" in function:
        return function
    return {"type": "function", "function": function}


# -- Answers ---------------------------------------------------------------------------------


def _rendered(chat: _Chat, tokenizer: Tokenizer, ends: Collection[str]) -> str:
    """Return the text of a chat. If its last turn is an answer, an end of text stands after it.

    Some templates write the end of an answer only with the turn that follows. Then it is added
    here, so that the model learns to stop.
    """
    assert tokenizer.render is not None  # `read` refuses a chat without a template
    text = tokenizer.render(chat.turns, prompts=False, tools=chat.tools)
    is_answer = chat.turns[-1]["role"] == "assistant"
    if is_answer and tokenizer.turn_end and without_end(text, ends) == text:
        text += tokenizer.decode(tokenizer.turn_end)
    return text


def _spans(text: str, chat: _Chat, limit: int, tokenizer: Tokenizer) -> tuple[list[Span], bool]:
    """Return the spans of a chat's answers in its text, and whether only the last was looked for.

    Some templates mark the spans. Of others, the span of a turn is what the template writes after
    the start of an answer if the chat ends with this turn. A template may write a turn differently
    once others follow. Then the result is the last answer's span and True, without a span if turns
    follow this answer, too. The search stops at the first answer that begins at the character
    `limit` or later. Raises DataError if an answer that ends the chat is not found, or if marks
    cannot be matched with turns.
    """
    if tokenizer.mark:
        return _marked_spans(chat, tokenizer), False

    # Where each turn's content ends in the text, for the later answers of a long chat.
    content_ends = None
    if len(chat.turns) > _FIRST_TURNS:
        content_ends = _ends_of_contents(text, chat, tokenizer)
    spans = []
    for i in chat.answers:
        span = None
        if content_ends and i >= _FIRST_TURNS:
            span = _span_by_question(text, chat, i, content_ends, tokenizer)
        if span is None:
            span = _span_by_all_turns(text, chat, i, tokenizer)

        if span is None:
            # The template writes this turn, or one before, differently in the whole chat.
            last = _span_by_all_turns(text, chat, chat.answers[-1], tokenizer)
            if last is None and chat.answers[-1] == len(chat.turns) - 1:  # no turn follows it
                need = "starts an answer otherwise than it writes the last one; set data.template"
                raise DataError(f"{chat.where}: the chat template {need} to another file")
            if last is None:
                return [], True
            return [last], True
        if span[0] >= limit:
            break  # after the end of a row, where nothing is learnt
        spans.append(span)
    return spans, False


def _marked_spans(chat: _Chat, tokenizer: Tokenizer) -> list[Span]:
    """Return the spans that the template marks, without those of answers that do not count.

    An answer does not count if its turn has `weight` 0, or is in the column of the prompt;
    `chat.answers` has the indices of the turns that count. If all answers count, all marked spans
    are returned, however many the template marks. Raises DataError if some answers do not count,
    and the template does not mark exactly one span for each answer: then it is not known which
    spans to leave out.
    """
    assert tokenizer.mark is not None  # the template marks answers
    marks = tokenizer.mark(chat.turns, chat.tools)  # the spans, in the order of the text
    all_answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
    if chat.answers == all_answers:
        return marks
    if len(marks) != len(all_answers):
        raise DataError(
            f"{chat.where}: the chat template marks {len(marks)} parts of {len(all_answers)} turns"
            " of the assistant, so it is not known which to leave out"
        )
    return [mark for i, mark in zip(all_answers, marks, strict=True) if i in chat.answers]


def _span_by_all_turns(text: str, chat: _Chat, i: int, tokenizer: Tokenizer) -> Span | None:
    """Return the span of the turn at index `i` in a chat's text, by rendering all turns before it.

    None if the template writes these turns differently in the whole chat.
    """
    render = tokenizer.render
    assert render is not None  # `read` refuses a chat without a template
    is_first = i == 0
    earlier = chat.turns[:i]
    if is_first:
        earlier = [_ASKED]  # templates refuse a chat without turns

    # The text up to the start of this answer, and up to its end.
    before = render(earlier, prompts=True, tools=chat.tools)
    through = render([*earlier, chat.turns[i]], prompts=False, tools=chat.tools)
    if not through.startswith(before):
        return None
    written = _without_space(through.removeprefix(before), tokenizer)

    if is_first:
        start = text.find(written)  # the text has no question before it
    elif text.startswith(before):
        start = len(before)
    else:
        return None
    if start < 0 or not text.startswith(written, start):
        return None
    return start, start + len(written)


def _ends_of_contents(text: str, chat: _Chat, tokenizer: Tokenizer) -> list[int] | None:
    """Return for each turn the index of the character after its content, in a chat's text.

    The chat is rendered with a mark at the end of each content. A turn without content has the end
    of the turn before. None if the template writes other text because of the marks.
    """
    assert tokenizer.render is not None  # `read` refuses a chat without a template
    marked: list[Turn] = []
    has_mark: list[bool] = []
    for turn in chat.turns:
        content = turn.get("content") or ""
        bare = content.rstrip()  # templates may leave out the space at the end
        has_mark.append(bare != "")
        if bare:
            turn = turn | {"content": bare + _MARK + content[len(bare) :]}
        marked.append(turn)

    # The pieces end after each content; the last is what follows the last content. Together they
    # are the text of the chat, if the marks change nothing else. An end of text that the template
    # did not write may follow in `text` (`_rendered`).
    pieces = tokenizer.render(marked, prompts=False, tools=chat.tools).split(_MARK)
    if not text.startswith("".join(pieces)) or len(pieces) != has_mark.count(True) + 1:
        return None
    ends = []
    end = 0
    pieces_left = iter(pieces)
    for is_marked in has_mark:
        if is_marked:
            end += len(next(pieces_left))
        ends.append(end)
    return ends


def _span_by_question(
    text: str, chat: _Chat, i: int, content_ends: Sequence[int], tokenizer: Tokenizer
) -> Span | None:
    """Return the span of the turn at index `i` > 0, by rendering it with the turn before it alone.

    For a long chat this is faster than to render all turns before it. The result is looked for
    between the content of the turn before and that of the turn after. `content_ends` has for each
    turn the index of the character after its content. None if the template refuses the two turns,
    writes them differently, or the result is not found there.
    """
    render = tokenizer.render
    assert render is not None  # `read` refuses a chat without a template
    question = [chat.turns[i - 1]]
    if question[0]["role"] != "user":  # templates refuse a chat that does not begin with a user
        question = [_ASKED, *question]
    try:
        # Up to the start of this answer, up to its end, and what the template writes as its start.
        before = render(question, prompts=True, tools=chat.tools)
        through = render([*question, chat.turns[i]], prompts=False, tools=chat.tools)
        start_of_answer = before.removeprefix(render(question, prompts=False, tools=chat.tools))
    except Exception:  # deliberately broad, because templates are programs
        return None
    # Give up if the template changes what precedes an answer once the answer is there, or changes
    # the question when it writes the start of an answer.
    if not through.startswith(before) or start_of_answer == before:
        return None
    written = _without_space(through.removeprefix(before), tokenizer)

    # Between the end of the content before and the end of the content after.
    stop = content_ends[i + 1] if i + 1 < len(content_ends) else len(text)
    position = text.find(start_of_answer + written, content_ends[i - 1], stop)
    start = position + len(start_of_answer)
    if position < 0 or start > content_ends[i]:  # not found, or found after this turn's content
        return None
    return start, start + len(written)


def _without_space(written: str, tokenizer: Tokenizer) -> str:
    """Return an answer without white space at its end, if a special token stands before that.

    The model stops at the special token, so that it need not learn what follows.
    """
    text = written.rstrip()
    return text if text.endswith(tokenizer.special) else written


def _with_end(text: str, span: Span, ends: Collection[str]) -> Span:
    """Return the span of an answer with the end of text after it, if one of `ends` stands there.

    A span that has an end of text already is returned as it is.
    """
    start, stop = span
    written = text[start:stop]
    if without_end(written, ends) != written:
        return span
    rest = text[stop : stop + _MAX_END_CHARS]
    for end in ends:
        if end and rest.lstrip().startswith(end):
            return start, stop + rest.index(end) + len(end)
    return span


def tokens_in_spans(offsets_N2: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return which tokens count, bool [N]: those with a character in one of the spans.

    `offsets_N2` has the index of each token's first character, and of the one after its last. The
    first token never counts, because nothing predicts it.
    """
    counts_N = np.zeros(len(offsets_N2), bool)
    # A token without characters may have any offsets. The search needs ascending ones.
    starts_N, ends_N = np.maximum.accumulate(offsets_N2, axis=0).T
    for start, end in spans:
        first = np.searchsorted(ends_N, start, "right")  # the first token that ends after `start`
        stop = np.searchsorted(starts_N, end)  # the first token that starts at `end` or later
        counts_N[first:stop] = True
    counts_N[:1] = False  # a slice, because there may be no token
    return counts_N
