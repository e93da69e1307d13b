"""Sources of text: Python's standard library, text files, JSON lines, tables, and the hub.

A source (`DataSource`) reads one file. It yields *rows*: texts, or a `Record` for each row of a
table; for a row that is bad it may yield a DataError instead. `documents_of` makes a `Document`
from a row: its text, and a classifier's class or a chat's answers. With `data.skip_bad` some bad
rows are skipped. Damaged files and missing columns raise DataError while reading, with the file. A
*commit* is a version of a data set on the hub. `data` is the config's group of this name.
"""

import codecs
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from adloco_jax.data import chats, hub
from adloco_jax.data.files import File, RemoteFile
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import (
    TOO_MANY_FILES,
    ConfigError,
    DataError,
    ResourceError,
    reason,
    remedy,
)
from adloco_jax.settings import CHATS, DataSettings

# The longest line of a JSON file, and so the longest document in it. The limit bounds the memory.
MAX_LINE_BYTES = 2**24
# Usual names of a text's column; a message proposes one if the configured one is not there.
_USUAL_TEXT_COLUMNS = ("content", "body", "document", "article", "sentence")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# The bytes with which files of these formats begin.
_ARROW_FILE = b"ARROW1"
_GZIP = b"\x1f\x8b"


class Record(NamedTuple):
    """A row of a table.

    Attributes:
      where: Names the row in messages: the file, and the row or line.
      columns: The values by name of the column.
      unread: Names of columns that the row has, but whose values the source has not read.
    """

    where: str
    columns: Mapping[str, Any]
    unread: Sequence[str] = ()


Row: TypeAlias = str | Record | DataError
"""What a source yields: a whole text, a row of a table, or the error of a bad row."""


class Document(NamedTuple):
    """A text to be tokenised.

    Attributes:
      text: The text; empty for a bad row.
      label: The class; 0 if texts are not labelled.
      answers: The answers of a chat; of other text only the names of unread columns.
      fault: The message of a bad row, which `data.skip_bad` may allow to skip; else empty.
    """

    text: str
    label: int = 0
    answers: chats.Answers = chats.Answers()
    fault: str = ""


class Part(NamedTuple):
    """A file of a source, or a file of a data set on the hub.

    Attributes:
      name: Name of the part, in records of files and in messages.
      file: The file; None for a data set on the hub, and for a source without files.
      read: `read(path)` yields the rows of the part. `path` is a copy of `file` on this machine, or
        None if `file` is None.
    """

    name: str
    file: File | None
    read: Callable[[File | None], Iterable[Row]]


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A way to read the text of a run: an entry of the table `DATA_SOURCES`.

    Attributes:
      documents: `documents(file, data)` yields the content of one file in a fixed order: texts, or
        a `Record` whose column `data.text_column` is the text. `data` is the config's group. If
        `needs` lacks `path`, it is called once, with None for the file.
      needs: Which of `path` and `text_column` must not be empty. A source that does not need
        `path` reads no files.
      refuses: The keys of the group `data` that must keep their default, each with the reason.
      cuts_single_file: Whether each file is one document, so that the end of a single file is held
        out.
      version: Version of the output of `documents`; rows are cached for later runs with the same
        version. None: rows are not cached.
      is_hub: Whether `data.path` may be the name of a data set on the hub.
    """

    documents: Callable[[Any, DataSettings], Iterable[Row]]
    needs: Sequence[str] = ("path",)
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cuts_single_file: bool = False
    version: int | None = None
    is_hub: bool = False


def documents_of(
    rows: Iterable[Row],
    data: DataSettings,
    *,
    where: str,
    num_classes: int | None,
    tokenizer: Tokenizer,
) -> Iterator[Document]:
    """Yield a document for each row of a source, except records with empty text.

    Args:
      rows: What a source yields for one file: texts, records, and errors of bad rows.
      data: The config's group `data`.
      where: The "key=value" that names the source, for messages.
      num_classes: Classes of labelled texts are 0 to `num_classes` - 1. None: texts have none.
      tokenizer: Its template renders chats.

    Raises:
      DataError: While reading, if the file cannot be read. Without `data.skip_bad` also if a row
        lacks a column, its text is not a string, its class is out of range, it is labelled but
        empty, or a chat is malformed.
      ConfigError: If chats need a template, and there is none.
      ResourceError: While reading, if a server does not answer, or too many files are open.
    """
    tokenizer = tokenizer.on(data.date)  # which chat templates write as today's
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            is_text = not isinstance(row, Record | DataError)
            if is_text:
                row = Record(f"{where}: document {number}", {data.text_column: row})
            try:
                document = _document(row, data, num_classes, tokenizer)
            except DataError as error:
                if not data.skip_bad:
                    raise
                document = Document(text="", fault=str(error))
            # A table may have empty cells. A bad row is passed on, to be counted.
            is_empty_record = not is_text and not document.text and not document.fault
            if not is_empty_record:
                yield document
    except (OSError, ValueError) as error:  # of a user's own source; those here raise DataError
        raise DataError(f"{where}: after document {number}: {error}") from error


def _document(
    row: Record | DataError, data: DataSettings, num_classes: int | None, tokenizer: Tokenizer
) -> Document:
    """Make the document of a row; raise DataError if the row is bad, or is an error itself.

    `num_classes` is None for texts without classes. Raises ConfigError if a chat needs a template,
    and there is none.
    """
    if isinstance(row, DataError):
        raise row
    used = _used_columns(data)  # from each column to the key of the config that names it
    require_columns(row.columns, used, row.where)
    if data.is_chat:
        text, answers = chats.read(row.columns, row.where, data, tokenizer)
        answers = answers._replace(unread=answers.unread.union(row.unread))
        return Document(text, answers=answers)

    text = chats.require_text(row.columns[data.text_column], f"{row.where}: {data.text_column!r}")
    unread = {name for name, value in row.columns.items() if value is not None}
    unread.update(row.unread)
    unread.difference_update(used)
    no_answers = chats.Answers(unread=frozenset(unread))
    if num_classes is not None:
        return Document(text, _label(row, text, data, num_classes), no_answers)
    # Each document gets an end of text when it is tokenised, and has none twice.
    text = chats.without_end(text, [tokenizer.decode([tokenizer.eot_id])])
    return Document(text, answers=no_answers)


def _label(row: Record, text: str, data: DataSettings, num_classes: int) -> int:
    """Return the class of a row: the integer in the column `data.label_column`.

    Raises DataError if the model has no such class, or there is no text.
    """
    label = row.columns[data.label_column]  # a bool, which is an instance of int, is not a class
    if not text or type(label) is not int or not 0 <= label < num_classes:
        raise DataError(
            f"{row.where}: {data.label_column!r}: have {label!r:.40} for {text!r:.40}, need a"
            f" class from 0 to {num_classes - 1} (model.num_classes={num_classes}) and some text"
        )
    return label


def require_columns(columns: Iterable[str], wanted: Mapping[str, str], where: str) -> None:
    """Raise DataError if a table lacks a wanted column, or has it twice.

    For the text's column the message proposes a usual one, if it is there. A table of preferences,
    as for DPO, has a message of its own.

    Args:
      columns: The names of the table's columns.
      wanted: From the name of each wanted column to the key of the group `data` that names it.
      where: The table or row, for messages.
    """
    columns = list(columns)
    missing = wanted.keys() - columns
    if missing and {"chosen", "rejected"} <= {*columns}:
        # Preferences have two answers to a prompt: the better, and the worse.
        need = "rename 'chosen' to 'messages', or beside 'prompt' to 'completion'"
        raise DataError(
            f"{where}: preferences (chosen, rejected), from which no method here learns; {need}, to"
            " train on the chosen answers"
        )
    for column, key in wanted.items():
        count = columns.count(column)
        if count == 1:
            continue
        proposed = "NAME"
        if key == "text_column":
            for name in (*CHATS, *_USUAL_TEXT_COLUMNS):
                # The names of columns of chats (`CHATS`) may join two columns by a plus.
                if {*name.split("+")} <= {*columns}:
                    proposed = name
                    break
        have = f"{count} fields" if count else "no field"
        need = f"have {', '.join(columns)}; set data.{key}={proposed}"
        raise DataError(f"{where}: {have} {column!r}, {need}")


def first_columns(source: DataSource, file: File | None, data: DataSettings) -> list[str]:
    """Return the names of a file's columns, as its first proper row has them.

    Bad rows are passed over. Empty if the file has texts without columns, or no proper row. `file`
    is None for a source that reads no file. Raises DataError if the file is damaged.
    """
    # With these names empty, no column is required. A source that reads only the columns that the
    # config names then gives the names of all columns in `Record.unread`.
    data = data.model_copy(update={"text_column": "", "label_column": ""})
    for row in source.documents(file, data):
        if isinstance(row, Record):
            return [*row.columns, *row.unread]
        if not isinstance(row, DataError):
            break
    return []


# -- The sources -----------------------------------------------------------------------------


def stdlib_documents(file: Path | None, data: DataSettings) -> Iterator[str]:
    """Yield the source files of Python's standard library, in the order of their paths.

    Each topic of Python's help is a document. Tests, installed packages, and files that differ by
    machine are left out. The arguments, which every source is given, are not used. Raises DataError
    if a file cannot be read.
    """
    for path in stdlib_files():
        if path.name == "topics.py":  # of the package pydoc_data: one dict, from topic to text
            from pydoc_data.topics import topics

            yield from (topics[name] for name in sorted(topics))
        else:
            yield read_text(path)


def stdlib_files() -> list[Path]:
    """List the files of Python's standard library that `stdlib_documents` reads, sorted by path."""
    files = []
    for at, folders, names in os.walk(sysconfig.get_path("stdlib")):
        # `os.walk` enters the folders that stay in the list. Packages are identifiers, and folders
        # such as site-packages or lib-dynload are not.
        folders[:] = [name for name in folders if name.isidentifier() and name not in _TEST_FOLDERS]
        for name in names:
            # The files _sysconfigdata… describe how this Python was built.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                files.append(Path(at, name))
    return sorted(files, key=Path.as_posix)


def text_documents(file: Path, data: DataSettings) -> Iterator[str]:
    """Yield the whole text of a file as one document, unless the file is empty.

    Raises DataError if the file cannot be read, is not UTF-8, or has NUL characters.
    """
    text = read_text(file)
    if text:
        yield text


def jsonl_documents(file: Path, data: DataSettings) -> Iterator[Record | DataError]:
    """Yield a record for each line of a `.json` or `.jsonl` file, plain or `.gz`; skip blank lines.

    Lines are JSON objects of at most `MAX_LINE_BYTES`. For another line a DataError is yielded.
    Raises DataError if the file is damaged or empty, or a line is too long.
    """
    with _as_data_errors(file), _opened(file) as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_LINE_BYTES + 1)  # one byte more shows that it is too long
            if number == 1:
                if not line:
                    raise DataError(f"{file}: empty, need one JSON object per line")
                line = line.removeprefix(codecs.BOM_UTF8)
            elif not line:
                return  # the file ends here; a blank line has its line break
            if line.strip():
                yield _json_row(line, f"{file}:{number}")


def table_documents(file: Path, data: DataSettings) -> Iterator[Record | DataError]:
    """Yield a record for each row of a table, with the reader for the ending of the file's name.

    Raises DataError if there is no reader for it, or the file is damaged.
    """
    documents = _DOCUMENTS_BY_ENDING.get(Path(file.name.removesuffix(".gz")).suffix)
    if documents is None:
        raise DataError(
            f"{file}: data.source=hf reads data sets of the hub, and files that end in"
            f" {', '.join(_DOCUMENTS_BY_ENDING)}; data.source=text reads plain text, and a glob"
            " leaves other files out"
        )
    return documents(file, data)


def csv_documents(file: Path, data: DataSettings) -> Iterator[Record | DataError]:
    """Yield a record for each row of a CSV or TSV table; the first line names the columns.

    The file may be `.gz`. Cells are text, except that a whole number in the column of classes
    becomes an int. A DataError is yielded for a row with too many cells. Raises DataError if the
    file is damaged, or lacks a column that the config names.
    """
    csv.field_size_limit(MAX_LINE_BYTES)  # the library's own limit is too small for documents
    delimiter = "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","
    last_line = 0  # number of the line on which the last whole row ends
    with _as_data_errors(file), _opened(file) as content:
        lines = io.TextIOWrapper(content, "utf-8-sig", newline="")
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)  # or csv.Error
        try:
            require_columns(rows.fieldnames or (), _used_columns(data), str(file))
            last_line = rows.line_num
            for row in rows:
                last_line = rows.line_num
                where = f"{file}:{last_line}"
                if None in row:  # the key under which `csv` puts cells after the last column
                    yield DataError(f"{where}: more cells than there are columns")
                    continue
                label = row.get(data.label_column) or ""  # without classes the name is empty
                if re.fullmatch(r"-?\d{1,18}", label):  # 18 digits fit in an int64
                    row[data.label_column] = int(label)
                yield Record(where, row)
        except csv.Error as error:
            why = f"damaged ({error}); a quote may not close"
            raise DataError(f"{file}:{last_line + 1}: {why}") from error


def parquet_documents(file: Path, data: DataSettings) -> Iterator[Record]:
    """Yield a record for each row of a parquet file; read only columns that the config names.

    Raises DataError if the file is damaged, or lacks such a column.
    """
    import pyarrow.parquet

    with _as_data_errors(file, pyarrow.ArrowException), _opened(file) as content:
        table = pyarrow.parquet.ParquetFile(content)
        # Names of the columns to read; and of the others, which a message lists later.
        columns, unread = _columns_to_read(table.schema_arrow.names, data, str(file))
        batches = table.iter_batches(batch_size=1024, columns=columns)  # rows in memory at a time
        yield from _arrow_records(batches, file, unread)


def arrow_documents(file: Path, data: DataSettings) -> Iterator[Record]:
    """Yield a record for each row of an Arrow file or stream; the library `datasets` saves streams.

    Raises DataError if the file is damaged, or lacks a column that the config names.
    """
    import pyarrow.ipc

    with _as_data_errors(file, pyarrow.ArrowException), _opened(file) as content:
        is_file = content.peek(len(_ARROW_FILE)).startswith(_ARROW_FILE)
        if is_file:
            table = pyarrow.ipc.open_file(content)
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            table = pyarrow.ipc.open_stream(content)
            batches = iter(table)
        columns, unread = _columns_to_read(table.schema.names, data, str(file))
        yield from _arrow_records((batch.select(columns) for batch in batches), file, unread)


def _arrow_records(batches: Iterable[Any], file: Path, unread: Sequence[str]) -> Iterator[Record]:
    """Yield a record for each row of pyarrow's record batches of a table.

    The batches have the columns to read, and `unread` names the table's others. `file` is the
    table, for messages.
    """
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows, 1):
        columns = {name: _without_none(value) for name, value in row.items()}
        yield Record(f"{file}: row {number}", columns, unread)


def _without_none(value: Any) -> Any:
    """Return a value without the fields that are None in its dicts, at any depth.

    In a table all dicts of a column have the same fields, of which some are None.
    """
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


@contextlib.contextmanager
def _as_data_errors(file: Path, *more_errors: type[Exception]) -> Iterator[None]:
    """Turn an error of the `with` block, which reads a file, into a DataError: the file is damaged.

    If too many files are open it is a ResourceError. `more_errors` are classes of errors that the
    file's reader raises for a damaged file, besides those of Python's library.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, *more_errors) as error:
        if getattr(error, "errno", None) in TOO_MANY_FILES:
            raise ResourceError(f"{file}: {reason(error)}; {remedy(error)}") from error
        why = f"damaged or unreadable ({reason(error, limit=200)}); a glob can leave it out"
        raise DataError(f"{file}: {why}") from error


def _used_columns(data: DataSettings) -> dict[str, str]:
    """Return the columns that a table must have, each with the key of `data` that names it."""
    # The name of a column of chats may join two columns by a plus: prompt+completion.
    texts = data.text_column.split("+") if data.is_chat else [data.text_column]
    used = dict.fromkeys(texts, "text_column")
    used[data.label_column] = "label_column"  # an empty name if there are no classes
    return {column: key for column, key in used.items() if column}


def _columns_to_read(
    names: Sequence[str], data: DataSettings, where: str
) -> tuple[list[str], list[str]]:
    """Return the names of a table's columns that are to be read, and those of the others.

    `names` are the table's columns. Raises DataError, which names the table `where`, if a column
    that the config names is missing.
    """
    used = _used_columns(data)
    require_columns(names, used, where)
    wanted = list(used)
    if data.is_chat:  # chats have columns that are read if they are there, such as tools
        wanted += [name for name in chats.BESIDE if name in names and name not in used]
    return wanted, [name for name in names if name not in wanted]


def read_text(file: Path) -> str:
    """Read UTF-8 text, also from a `.gz` file, without a byte-order mark.

    Raises:
      DataError: If the file is unreadable or not UTF-8, or has NUL characters.
      ResourceError: If too many files are open.
    """
    with _as_data_errors(file), _opened(file) as opened:
        text = opened.read().removeprefix(codecs.BOM_UTF8).decode()
    return chats.require_text(text, str(file))


def cut_in_two(text: str, *, where: str, heldout_frac: float) -> tuple[str, str]:
    """Cut a document in two: a beginning to train on, and an end to hold out.

    The cut is after the blank line nearest to the fraction 1 - heldout_frac of the characters. If
    this is further away than half the held-out length, the cut is after the nearest newline.

    Args:
      text: The document.
      where: The "key=value" that names it, for messages.
      heldout_frac: Fraction of the characters to hold out, in (0, 1).

    Raises:
      DataError: If there is no newline to cut at.
    """
    target = (1 - heldout_frac) * len(text)
    half_of_heldout = heldout_frac * len(text) / 2
    # The patterns match the empty text after a blank line, and after a newline.
    cut = _nearest_end(r"(?<=\n\n)|(?<=\r\n\r\n)", text, target)
    if not cut or abs(cut - target) > half_of_heldout:
        cut = _nearest_end(r"(?<=\n)", text, target)
    if cut:
        return text[:cut], text[cut:]
    raise DataError(
        f"{where}: the only document has no line break to cut a held-out part off at; need two "
        "documents, or data.heldout_path"
    )


def _nearest_end(pattern: str, text: str, target: float) -> int:
    """Return the end of the match whose end is nearest to the position `target`.

    Matches that end with the text are passed over; 0 without a match.
    """
    ends = (match.end() for match in re.finditer(pattern, text) if match.end() < len(text))
    return min(ends, key=lambda end: abs(end - target), default=0)


@contextlib.contextmanager
def _opened(file: File) -> Iterator[Any]:
    """Open a file to read bytes, decompressed if its content begins like gzip.

    The ending of its name does not matter, because a server may compress or decompress a file on
    the way. Raises OSError if it cannot be opened.
    """
    opened = file.open() if isinstance(file, RemoteFile) else open(file, "rb")
    with opened as content:
        is_gzip = content.peek(len(_GZIP)).startswith(_GZIP)
        yield gzip.open(content) if is_gzip else content


def _json_row(line: bytes, where: str) -> Record | DataError:
    """Return the record of a line of JSON, or a DataError that names `where` and what is wrong.

    A returned error is of this row alone, which may be skipped. A line longer than `MAX_LINE_BYTES`
    raises DataError, because it was not read to its end.
    """
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}: a line of more than {MAX_LINE_BYTES} bytes")
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return DataError(f"{where}: not one JSON object per line ({error})")
    if isinstance(record, list) and record and chats.is_chat(record):  # a line of nanochat's files
        record = {"messages": record}
    if not isinstance(record, dict):
        return DataError(f"{where}: have a JSON {type(record).__name__}, need one object per line")
    return Record(where, record)


def _hub_dataset(data: DataSettings, split: str, commit: str, *, where: str) -> Any:
    """Return a split of a data set on the hub, an `IterableDataset` of the library `datasets`.

    `where` is the "key=value" that names the data set.

    Raises:
      ConfigError: If the hub has no such data set, configuration or split, or refuses access.
      DataError: If the data set cannot be read.
      hub.Unreachable: If the hub does not answer.
    """
    import datasets  # imported only here, because the import is slow and few runs need it

    datasets.disable_progress_bars()  # `data.rows` shows its own
    # How long the library waits after a server has not answered, or has refused for now.
    limits: Any = datasets.config
    limits.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 5  # seconds
    limits.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 5
    # Called for its errors only: it gives up after seconds if the hub does not answer.
    hub.commit_of(data.path, commit, where=f"{where}, data.revision={data.revision}")
    where = f"{where}, data.name={data.name}, split {split}"
    with hub.as_user_errors(where):
        try:
            builder = datasets.load_dataset_builder(data.path, data.name or None, revision=commit)
            return builder.as_streaming_dataset(split=split)
        except ValueError as error:  # no such configuration or split; those that exist are listed
            raise ConfigError(f"{where}: {' '.join(str(error).split())[:300]}") from error


def hub_columns(data: DataSettings, *, where: str) -> list[str]:
    """Return the names of the columns of `data.split` of a data set on the hub.

    `where` is the "key=value" that names the data set.

    Raises:
      ConfigError: If the hub has no such data set, configuration or split, or refuses access.
      DataError: If the data set cannot be read.
      hub.Unreachable: If the hub does not answer.
    """
    dataset = _hub_dataset(data, data.split, data.revision, where=where)
    with hub.as_user_errors(where):
        columns = dataset.features  # by name; None if the hub does not know them
        if not columns:
            columns = next(iter(dataset), {})  # the first row, if there is one
        return list(columns)


def hub_parts(data: DataSettings, split: str, commit: str, *, where: str) -> list[Part]:
    """List the files of a split of a data set on the hub; a file is downloaded while it is read.

    `commit` is the data set's, and `where` the "key=value" that names the data set.

    Raises:
      ConfigError: If the hub has no such data set, configuration or split, or refuses access.
      DataError: If the data set lacks a column that the config names, or cannot be read.
      hub.Unreachable: If the hub does not answer.
    """
    dataset = _hub_dataset(data, split, commit, where=where)
    where = f"{where}, data.name={data.name}, split {split}"
    unread: list[str] = []
    with hub.as_user_errors(where):
        if dataset.features is not None:  # the hub knows the columns; else all are read
            columns, unread = _columns_to_read(list(dataset.features), data, where)
            dataset = dataset.select_columns(columns)
    num_files = dataset.num_shards  # a shard of the library is a file

    def records(index: int, path: None) -> Iterator[Record]:
        """Yield the records of a file of the split; there is no local file, so `path` is None."""
        with hub.as_user_errors(f"{where}, file {index}"):
            for number, row in enumerate(dataset.shard(num_shards=num_files, index=index), 1):
                columns = {name: _without_none(value) for name, value in row.items()}
                yield Record(f"{where}, file {index}: row {number}", columns, unread)

    stem = "/".join(part for part in (data.path, data.name, split) if part)
    parts = []
    for index in range(num_files):
        name = f"{stem}/{index:05d}-of-{num_files:05d}"
        parts.append(Part(name, file=None, read=functools.partial(records, index)))
    return parts


# What reads a table's file, by the ending of its name.
_DOCUMENTS_BY_ENDING: dict[str, Callable[[Path, DataSettings], Iterator[Record | DataError]]] = {
    ".csv": csv_documents,
    ".tsv": csv_documents,
    ".json": jsonl_documents,
    ".jsonl": jsonl_documents,
    ".parquet": parquet_documents,
    ".arrow": arrow_documents,
}


# -- The table -------------------------------------------------------------------------------

_ONLY_HF = "only hf has configurations, splits and revisions; leave it as it is"
# The options of `data` that the other sources refuse, each with the reason that a message gives.
_KEYS_OF_HF = dict.fromkeys(("name", "split", "revision", "heldout_split"), _ONLY_HF)
_TABLE_NEEDS = ("path", "text_column")  # options that must not be empty

DATA_SOURCES: dict[str, DataSource] = {
    "stdlib": DataSource(stdlib_documents, needs=(), refuses=_KEYS_OF_HF, version=1),
    "text": DataSource(text_documents, refuses=_KEYS_OF_HF, cuts_single_file=True, version=1),
    "jsonl": DataSource(jsonl_documents, _TABLE_NEEDS, refuses=_KEYS_OF_HF, version=1),
    "parquet": DataSource(parquet_documents, _TABLE_NEEDS, refuses=_KEYS_OF_HF, version=1),
    "hf": DataSource(table_documents, _TABLE_NEEDS, version=1, is_hub=True),
}
