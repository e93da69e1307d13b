"""Sources of text: Python's standard library, text files, JSON lines, tables, and the hub.

A source yields the texts of one file, or a `Record` for each row of a table; `documents_of` takes
the text, and a classifier's class or a chat's answers, from a record. Damaged files and missing
columns raise DataError while reading, with the file; a source may yield the DataError of a row.
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
_TEXTS = ("content", "body", "document", "article", "sentence")  # usual names of a text's column
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


class Record(NamedTuple):
    """A row of a table: a value for each name of a column. `where` names the row in messages.

    `unread` are names of columns of which the source has not read the values.
    """

    where: str
    columns: Mapping[str, Any]
    unread: Sequence[str] = ()


Row: TypeAlias = str | Record | DataError


class MissingColumn(DataError):
    """Error: a table, whose `columns` are these, lacks one that the config names."""

    def __init__(self, message: str, columns: Sequence[str]):
        """Keep the columns that there are."""
        super().__init__(message)
        self.columns = columns


class Document(NamedTuple):
    """A text, its class (0 if texts are not labelled), and the answers of a chat.

    A bad row that `data.skip_bad` lets pass has no text, and its error as `fault`.
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
      read: `read(path)` yields the texts or records of the local file; None if there is none.
    """

    name: str
    file: File | None
    read: Callable[[File | None], Iterable[Row]]


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A way to read the text of a run: an entry of the table `DATA_SOURCES`.

    Attributes:
      documents: `documents(file, data)` yields the content of one file in a fixed order: texts, or
        `Record`s whose column `data.text_column` is the text. `data` is the config's group. If
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
    found: Iterable[Row],
    data: DataSettings,
    *,
    where: str,
    num_classes: int | None,
    tokenizer: Tokenizer,
) -> Iterator[Document]:
    """Convert the texts and records of a source to documents; skip records with empty text.

    `where` is the "key=value" that names the source. Classes are in [0, num_classes). Chats are
    rendered by the template of `tokenizer`.

    Raises:
      DataError: While reading, without `data.skip_bad`, if a row's text is not a string, its class
        is out of range, it is labelled but empty, or a chat is malformed.
      ConfigError: If chats need a template, and there is none.
    """
    number, tokenizer = 0, tokenizer.on(data.date)
    try:
        for number, row in enumerate(found, 1):
            is_text = not isinstance(row, Record | DataError)
            if is_text:
                row = Record(f"{where}: document {number}", {data.text_column: row})
            try:
                document = _document(row, data, num_classes, tokenizer)
            except DataError as error:
                if not data.skip_bad:
                    raise
                document = Document("", fault=str(error))
            if is_text or document.text or document.fault:
                yield document
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: after document {number}: {error}") from error


def _document(
    row: Record | DataError, data: DataSettings, num_classes: int | None, tokenizer: Tokenizer
) -> Document:
    if isinstance(row, DataError):
        raise row
    require_columns(row.columns, _used(data), row.where)
    if data.is_chat:
        text, answers = chats.read(row.columns, row.where, data, tokenizer)
        answers = answers._replace(unread=answers.unread.union(row.unread))
        return Document(text, answers=answers)
    text = chats.require_text(row.columns[data.text_column], f"{row.where}: {data.text_column!r}")
    given = {name for name, value in row.columns.items() if value is not None}
    answers = chats.Answers(unread=frozenset(given.union(row.unread) - _used(data).keys()))
    if num_classes is not None:
        return Document(text, _label(row, text, data, num_classes), answers)
    text = chats.without_end(text, [tokenizer.decode([tokenizer.eot_id])])
    return Document(text, answers=answers)


def _label(row: Record, text: str, data: DataSettings, num_classes: int) -> int:
    label = row.columns[data.label_column]
    if not text or type(label) is not int or not 0 <= label < num_classes:
        raise DataError(
            f"{row.where}: {data.label_column!r}: have {label!r:.40} for {text!r:.40}, need a"
            f" class from 0 to {num_classes - 1} (model.num_classes={num_classes}) and some text"
        )
    return label


def require_columns(columns: Iterable[str], wanted: Mapping[str, str], where: str) -> None:
    """Raise DataError if a table lacks a column, or has it twice; `wanted` maps them to keys."""
    columns = list(columns)
    missing = wanted.keys() - columns
    if missing and {"chosen", "rejected"} <= {*columns}:
        need = "rename 'chosen' to 'messages', or beside 'prompt' to 'completion'"
        raise MissingColumn(
            f"{where}: preferences (chosen, rejected), from which no method here learns; {need}, to"
            " train on the chosen answers",
            columns,
        )
    for column, key in wanted.items():
        if (count := columns.count(column)) != 1:
            likely = (*CHATS, *_TEXTS) if key == "text_column" else ()
            other = next((name for name in likely if {*name.split("+")} <= {*columns}), "NAME")
            need = f"have {', '.join(columns)}; set data.{key}={other}"
            raise MissingColumn(
                f"{where}: {count or 'no'} field{'s' * (count > 1)} {column!r}, {need}", columns
            )


# -- The sources -----------------------------------------------------------------------------


def stdlib_documents(file: Path | None, data: DataSettings) -> Iterator[str]:
    """Yield the source files of Python's standard library, in the order of their paths.

    Each topic of Python's help is a document. Tests, installed packages, and files that differ by
    machine are left out.
    """
    for file in stdlib_files():
        if file.name == "topics.py":  # in the package pydoc_data; the file has one dict of texts
            from pydoc_data.topics import topics

            yield from (topics[name] for name in sorted(topics))
        else:
            yield read_text(file)


def stdlib_files() -> list[Path]:
    """List the files that `stdlib_documents` reads."""
    files = []
    for at, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [f for f in folders if f.isidentifier() and f not in _TEST_FOLDERS]
        names = [name for name in names if not name.startswith("_sysconfigdata")]
        files += [Path(at, name) for name in names if name.endswith(".py")]
    return sorted(files, key=Path.as_posix)


def text_documents(file: Path, data: DataSettings) -> Iterator[str]:
    """Yield the whole text of a file as one document, unless the file is empty."""
    if text := read_text(file):
        yield text


def jsonl_documents(file: Path, data: DataSettings) -> Iterator[Record | DataError]:
    """Yield a record for each line of a `.json` or `.jsonl` file, perhaps `.gz`; skip blank lines.

    Lines are JSON objects of at most `MAX_LINE_BYTES`.
    """
    with _faults(file), _opened(file) as lines:
        for number in itertools.count(1):
            line, where = lines.readline(MAX_LINE_BYTES + 1), f"{file}:{number}"
            if not line and number == 1:
                raise DataError(f"{file}: empty, need one JSON object per line")
            if not line:
                return
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield _json_row(line, where)


def table_documents(file: Path, data: DataSettings) -> Iterator[Record | DataError]:
    """Yield a record for each row of a table, with the reader for the ending of the file's name."""
    suffix = Path(file.name.removesuffix(".gz")).suffix
    if (read := _BY_ENDING.get(suffix)) is None:
        raise DataError(
            f"{file}: data.source=hf reads data sets of the hub, and files that end in"
            f" {', '.join(_BY_ENDING)}; data.source=text reads plain text, and a glob leaves other"
            " files out"
        )
    return read(file, data)


def csv_documents(file: Path, data: DataSettings) -> Iterator[Record | DataError]:
    """Yield a record for each row of a CSV or TSV table; the first line names the columns.

    Cells are text, except that a whole number in the column of classes becomes an int.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    delimiter = "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","
    last = 0  # line of the end of the last whole row
    with _faults(file), _opened(file) as content:
        lines = io.TextIOWrapper(content, "utf-8-sig", newline="")
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            require_columns(rows.fieldnames or (), _used(data), str(file))
            last = rows.line_num
            for row in rows:
                where, last = f"{file}:{rows.line_num}", rows.line_num
                if None in row:
                    yield DataError(f"{where}: more cells than there are columns")
                    continue
                if re.fullmatch(r"-?\d{1,18}", row.get(data.label_column) or ""):
                    row[data.label_column] = int(row[data.label_column])
                yield Record(where, row)
        except csv.Error as error:
            why = f"damaged ({error}); a quote may not close"
            raise DataError(f"{file}:{last + 1}: {why}") from error


def parquet_documents(file: Path, data: DataSettings) -> Iterator[Record]:
    """Yield a record for each row of a parquet file; read only columns that the config names."""
    import pyarrow.parquet

    with _faults(file, pyarrow.ArrowException), _opened(file) as content:
        rows = pyarrow.parquet.ParquetFile(content)
        columns, unread = _read_columns(rows.schema_arrow.names, data, str(file))
        yield from _arrow_records(rows.iter_batches(1024, columns=columns), file, unread)


def arrow_documents(file: Path, data: DataSettings) -> Iterator[Record]:
    """Yield a record for each row of an Arrow file or stream; `datasets` saves streams."""
    import pyarrow.ipc

    with _faults(file, pyarrow.ArrowException), _opened(file) as content:
        if content.peek(6)[:6] == b"ARROW1":
            rows = pyarrow.ipc.open_file(content)
            batches = map(rows.get_batch, range(rows.num_record_batches))
        else:
            rows = batches = pyarrow.ipc.open_stream(content)
        columns, unread = _read_columns(rows.schema.names, data, str(file))
        yield from _arrow_records((batch.select(columns) for batch in batches), file, unread)


def _arrow_records(batches: Iterable[Any], file: Path, unread: Sequence[str]) -> Iterator[Record]:
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, columns in enumerate(rows, 1):
        columns = {name: _without_none(value) for name, value in columns.items()}
        yield Record(f"{file}: row {number}", columns, unread)


def _without_none(value: Any) -> Any:
    """Leave out fields without a value; in a table all objects of a column have the same fields."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _faults(file: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Call a file damaged if reading fails, unless too many files are open."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, *kinds) as error:
        if getattr(error, "errno", None) in TOO_MANY_FILES:
            raise ResourceError(f"{file}: {reason(error)}; {remedy(error)}") from error
        why = f"damaged or unreadable ({reason(error, 200)}); a glob can leave it out"
        raise DataError(f"{file}: {why}") from error


def _used(data: DataSettings) -> dict[str, str]:
    """Return the columns to read, each with the key of the config that names it."""
    texts = data.text_column.split("+") if data.is_chat else [data.text_column]
    names = dict.fromkeys(texts, "text_column") | {data.label_column: "label_column"}
    return {column: key for column, key in names.items() if column}


def _read_columns(names: Sequence[str], data: DataSettings, where: str) -> tuple[list, list]:
    """Return the columns of a table to read, and the others."""
    require_columns(names, used := _used(data), where)
    if data.is_chat:
        used |= dict.fromkeys(name for name in chats.BESIDE if name in names)
    return [*used], [name for name in names if name not in used]


def read_text(file: Path) -> str:
    """Read UTF-8 text, perhaps from `.gz`, without a byte-order mark.

    Raises:
      DataError: If the file is unreadable or not UTF-8.
    """
    with _faults(file), _opened(file) as opened:
        text = opened.read().removeprefix(codecs.BOM_UTF8).decode()
    return chats.require_text(text, str(file))


def cut_in_two(text: str, *, where: str, heldout_frac: float) -> tuple[str, str]:
    """Cut a document in two: a beginning to train on, and an end to hold out.

    The cut is at the blank line nearest to the fraction 1 - heldout_frac of the characters, or at
    the nearest newline if that line is further away than half the held-out length.

    Raises:
      DataError: If there is no newline to cut at.
    """
    target = (1 - heldout_frac) * len(text)
    blank_line, newline = r"(?<=\n\n)|(?<=\r\n\r\n)", r"(?<=\n)"
    for pattern, slack in ((blank_line, heldout_frac * len(text) / 2), (newline, len(text))):
        ends = (match.end() for match in re.finditer(pattern, text) if match.end() < len(text))
        cut = min(ends, key=lambda end: abs(end - target), default=0)
        if cut and abs(cut - target) <= slack:
            return text[:cut], text[cut:]
    raise DataError(
        f"{where}: the only document has no line break to cut a held-out part off at; need two "
        "documents, or data.heldout_path"
    )


@contextlib.contextmanager
def _opened(file: File) -> Iterator[Any]:
    """Open a file, by gzip if it begins so: a server may compress or decompress it on the way."""
    with file.open() if isinstance(file, RemoteFile) else open(file, "rb") as content:
        yield gzip.open(content) if content.peek(2)[:2] == b"\x1f\x8b" else content


def _json_row(line: bytes, where: str) -> Record | DataError:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}: a line of more than {MAX_LINE_BYTES} bytes")
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return DataError(f"{where}: not one JSON object per line ({error})")
    if isinstance(record, list) and record and chats.is_chat(record):  # nanochat's
        record = {"messages": record}
    if not isinstance(record, dict):
        return DataError(f"{where}: have a JSON {type(record).__name__}, need one object per line")
    return Record(where, record)


def hub_parts(data: DataSettings, split: str, commit: str, *, where: str) -> list[Part]:
    """List the files of a split of a data set on the hub; a file is downloaded while it is read.

    Raises:
      ConfigError: If the data set has no such configuration or split.
      DataError: If the data set lacks a column that the config names.
      Unreachable: If the hub does not answer.
    """
    import datasets  # imported only here, because the import is slow and few runs need it

    datasets.disable_progress_bars()
    limits: Any = datasets.config
    limits.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 5  # seconds
    limits.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 5
    hub.commit_of(data.path, commit, where=f"{where}, data.revision={data.revision}")
    where = f"{where}, data.name={data.name}, split {split}"
    unread: list[str] = []
    with hub.faults(where):
        try:
            builder = datasets.load_dataset_builder(data.path, data.name or None, revision=commit)
            dataset: Any = builder.as_streaming_dataset(split=split)
        except ValueError as error:  # no such configuration or split; those that exist are listed
            raise ConfigError(f"{where}: {' '.join(str(error).split())[:300]}") from error
        if dataset.features is not None:
            columns, unread = _read_columns([*dataset.features], data, where)
            dataset = dataset.select_columns(columns)
    count = dataset.num_shards

    def records(index: int, path: None) -> Iterator[Record]:
        with hub.faults(f"{where}, file {index}"):
            for number, row in enumerate(dataset.shard(num_shards=count, index=index), 1):
                columns = {name: _without_none(value) for name, value in row.items()}
                yield Record(f"{where}, file {index}: row {number}", columns, unread)

    stem = "/".join(part for part in (data.path, data.name, split) if part)
    return [
        Part(f"{stem}/{index:05d}-of-{count:05d}", None, functools.partial(records, index))
        for index in range(count)
    ]


_BY_ENDING: dict[str, Callable[[Path, DataSettings], Iterator[Record | DataError]]] = {
    **dict.fromkeys((".csv", ".tsv"), csv_documents),
    **dict.fromkeys((".json", ".jsonl"), jsonl_documents),
    **{".parquet": parquet_documents, ".arrow": arrow_documents},
}


# -- The table -------------------------------------------------------------------------------

_PARTS = "only hf has configurations, splits and revisions; leave it as it is"
_NO_PARTS = dict.fromkeys(("name", "split", "revision", "heldout_split"), _PARTS)
_COLUMNS = ("path", "text_column")

DATA_SOURCES: dict[str, DataSource] = {
    "stdlib": DataSource(stdlib_documents, needs=(), refuses=_NO_PARTS, version=1),
    "text": DataSource(text_documents, refuses=_NO_PARTS, cuts_single_file=True, version=1),
    "jsonl": DataSource(jsonl_documents, _COLUMNS, _NO_PARTS, version=1),
    "parquet": DataSource(parquet_documents, _COLUMNS, _NO_PARTS, version=1),
    "hf": DataSource(table_documents, _COLUMNS, version=1, is_hub=True),
}
