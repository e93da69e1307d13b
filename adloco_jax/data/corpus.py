"""Make the corpus of a run from its settings: the rows, and the order in which workers read them.

Of a row's L+1 tokens, the first is only an input and the last only a target. L is
`data.sequence_length`. The text is what `data.path` or `data.source` names: files, or a data set on
the hub. A *part* is one of its files. Held-out text is *separate* if the config names files or a
split for it. A *labelled* text has a class, and a row of its own. A *request* is a dict of plain
JSON with all settings that determine the rows; rows that were made before are found by it in the
user's cache. A *manifest* describes rows that were made. *Guard rows* are held-out rows by which
merges of trainers are judged. `where` is a "key=value" for messages.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adloco_jax.data import hub, prepared, rows, sources
from adloco_jax.data.files import File, cache_folder, find, identity, is_on_hub
from adloco_jax.data.prepared import DocumentRows, Manifest, PreparedRows, RowArrays, rows_at
from adloco_jax.data.rows import NUM_FIELDS, Job
from adloco_jax.data.sampling import MAX_GUARD_ROWS, RowOrder, order_of, stream_rows
from adloco_jax.data.sources import DATA_SOURCES, Part, Row
from adloco_jax.data.tokenizers import Tokenizer, tokenizer_of
from adloco_jax.errors import ConfigError, DataError, UserError, counted
from adloco_jax.row_batch import RowBatch, as_row_batch
from adloco_jax.settings import CHATS, DataSettings, Settings

Note = Callable[[str], None]  # called with each line to show to the user

# The source that reads a file, by the ending of its name. Others are read as text.
_SOURCE_BY_ENDING = {
    "json": "jsonl",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "csv": "hf",
    "tsv": "hf",
    "arrow": "hf",
}
_ANY_COMMIT = "any"  # stands for a commit in requests that are compared without their commits
# Number of rows of chats that are looked at to see how answers end.
_NUM_SAMPLE_ROWS = 64
_EXCERPT_CHARS = 240  # of a row that is shown to the user: about three lines


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Rows of tokens on disk, and the order in which each worker reads them.

    Attributes:
      rows: Rows to train on, [num_sequences, L+1], integers of any width. The row of a labelled
        text has 2 + L integers: the class, the number n of tokens, and L tokens, zero after n.
        `DocumentRows` if the model separates documents.
      heldout_rows: Rows of held-out documents, which have no row in `rows`.
      tokenizer: The tokenizer that made the ids.
      manifest: The description of the rows, and of the files from which they were made.
      order: The order of reading. It does not affect which rows are held out.
      tokens_per_byte: Held-out tokens per byte of their UTF-8 text, which turns a loss per token
        into one per byte. None for labelled texts, whose loss is not per token.
    """

    rows: np.ndarray | DocumentRows
    heldout_rows: np.ndarray | DocumentRows
    tokenizer: Tokenizer
    manifest: Manifest
    order: RowOrder
    tokens_per_byte: float | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the hashes of training rows, held-out rows and tokenizer."""
        return fingerprint_of(self.manifest, len(self.rows))

    @property
    def commit(self) -> str:
        """Commit of the hub's data set from which the rows were made; empty for other data."""
        return str(self.manifest.request.get("commit", ""))

    @property
    def shards(self) -> Sequence[dict]:
        """A dict for each file that was read: name, number of documents, maybe size and hash."""
        return [record.model_dump(exclude_none=True) for record in self.manifest.files]

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray | RowBatch:
        """Return rows `start` to `start + count - 1` of a worker's stream, as a model reads them.

        They are int32 [count, L + 1]; or a `RowBatch`, which also has the starts of documents and
        the weights of losses, if the model separates documents. `trainer` is the permanent id of a
        trainer (a model in training). `stream` is the number of one of its streams: the endless
        sequence of rows that one of its workers reads.
        """
        index = stream_rows(self.order, trainer=trainer, stream=stream, start=start, count=count)
        return rows_at(self.rows, index)

    def describe(self) -> str:
        """Describe the rows of a run in words, with an excerpt of a training row."""
        tokenizer = self.tokenizer
        first = self.batch(trainer=0, stream=0, start=0, count=1)
        row = as_row_batch(first).tokens[0]  # `batch` gives an array or a `RowBatch`
        num_train = str(len(self.rows))
        num_heldout = str(len(self.heldout_rows))
        of_class = ""
        if self.tokens_per_byte is None:
            # A labelled row has two fields before its tokens: the class, and how many are real.
            label, num_real = row[:NUM_FIELDS]
            num_train += _by_class(self.rows)
            num_heldout += _by_class(self.heldout_rows)
            of_class = f" of class {label}"
            num_tokens = len(row) - NUM_FIELDS
            row = row[NUM_FIELDS : NUM_FIELDS + num_real]
        else:
            num_tokens = len(row) - 1
        return (
            f"{self._describe_text()}\n"
            f"tokenizer: {tokenizer.name}, {tokenizer.vocab_size} ids{self._remark_on_ends()}\n"
            f"rows: {num_train} of {num_tokens} tokens to train on, {num_heldout} held"
            f" out{self._remarks_on_cuts()}; a model will see, for instance{of_class}:\n"
            f"  | {readable(row, tokenizer, max_chars=_EXCERPT_CHARS)}{self._warning_of_left_out()}"
        )

    def _describe_text(self) -> str:
        """Say which text was read, and how many documents or chats of it are on each side."""
        manifest = self.manifest
        # Records without bytes are of the hub's data sets, and of sources that read no file. Their
        # names say what was read. The last is of the text to train on, which is read last.
        num_files = sum(1 for record in manifest.files if record.bytes is not None)
        read = counted(num_files, "file") if num_files else manifest.files[-1].name
        kind = "chat" if manifest.loss else "document"  # only chats have a `loss`
        num_train, num_heldout = manifest.documents
        text = f"data: {read}; {counted(num_train, kind)} to train on, {num_heldout} held out"
        if manifest.copies:
            text += f"; {manifest.copies} copies of held-out ones left out"
        if manifest.unread:
            text += f"\nnot read: {', '.join(manifest.unread)}"
        return text

    def _remarks_on_cuts(self) -> str:
        """Say how many texts were cut or left out; the result is empty if none was.

        For chats, also say how many tokens of the training rows, and how many of the held-out rows,
        count in the loss. Each remark begins with a comma or semicolon.
        """
        manifest = self.manifest
        rows = self.rows
        heldout_rows = self.heldout_rows
        text = ""
        if manifest.truncated:
            kind = "chats" if manifest.loss else "texts"
            text += f", {manifest.truncated} of the {kind} cut"
        if isinstance(rows, DocumentRows) and isinstance(heldout_rows, DocumentRows):
            if manifest.loss:  # the rows are chats
                of_answers = " of answers" if manifest.loss == "answers" else ""
                text += f"; {rows.num_answer_tokens:,} and {heldout_rows.num_answer_tokens:,}"
                text += f" tokens{of_answers} count"
        faults = (
            (manifest.dropped, "chat", "without an answer within data.sequence_length left out"),
            (manifest.rejected, "chat", "with a false label left out"),
            (manifest.only_last, "chat", "count by the last answer only: the template cuts others"),
            (manifest.bad, "bad row", "left out"),
        )
        for number, noun, why in faults:
            if number:
                text += f"; {counted(number, noun)} {why}"
        return text

    def _warning_of_left_out(self) -> str:
        """Return a warning, on a new line, if most texts are left out; else an empty text."""
        manifest = self.manifest
        kind = "chats" if manifest.loss else "documents"  # only chats have a `loss`
        left_out = manifest.dropped + manifest.rejected + manifest.bad
        in_rows = sum(manifest.documents)  # to train on, and held out
        total = in_rows + manifest.copies + left_out
        if 2 * left_out <= total:
            return ""
        line = f"\nwarning: {left_out} of {total} {kind} are left out"
        if manifest.dropped:
            line += f", {manifest.dropped} because data.sequence_length ends before their answer"
        return line

    def _remark_on_ends(self) -> str:
        """Return a remark if a model would not learn from these chats to stop after an answer.

        A model stops to write at one of the ids `tokenizer.ends`. It learns to stop if answers end
        by one of them. A chat template may end answers by another token (`tokenizer.turn_end`), or
        by no special token. Empty if there is nothing to remark, or rows are not chats.
        """
        if not isinstance(self.rows, DocumentRows) or self.rows.answers is None:
            return ""
        # All ids that occur in the answers of some rows: these include the ids at their ends.
        tokens = self.rows.tokens[:_NUM_SAMPLE_ROWS]
        is_answer = self.rows.answers[:_NUM_SAMPLE_ROWS]
        answer_ids = set(tokens[is_answer].tolist())
        stop_ids = set(self.tokenizer.ends)
        turn_end_ids = set(self.tokenizer.turn_end)  # one or none

        new_stop_ids = turn_end_ids - stop_ids
        if not answer_ids.isdisjoint(new_stop_ids):
            end = self.tokenizer.decode(self.tokenizer.turn_end)
            return (
                f"; answers end by {end}, where the model does not stop yet: the export's"
                " generation_config.json names it"
            )
        if not answer_ids.isdisjoint(stop_ids | turn_end_ids):
            return ""  # answers end where the model stops
        eot = self.tokenizer.decode([self.tokenizer.eot_id])
        return (
            "; the model will not learn to stop, because the template writes no special token"
            f" behind answers; set data.template to a file that writes {eot} there"
        )


def fingerprint_of(manifest: Manifest, num_rows: int) -> str:
    """Return `Corpus.fingerprint` of the `num_rows` training rows that a manifest describes.

    `Manifest.fingerprint` is the tokenizer's, and `hashes` are those of the files of rows.
    """
    parts = manifest.fingerprint, num_rows, *manifest.hashes
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def _by_class(rows: np.ndarray | DocumentRows) -> str:
    """Say how many labelled rows each class has, as in " (5, 7 by class)"."""
    # A labelled row begins with its class. `asarray` only tells the type checker what the rows are.
    counts = np.bincount(np.asarray(rows)[:, 0])
    return f" ({', '.join(map(str, counts))} by class)"


def readable(row: np.ndarray, tokenizer: Tokenizer, *, max_chars: int) -> str:
    """Decode a row to one line of at most `max_chars` characters."""
    text = tokenizer.decode(row)
    # A line break, for instance, is shown as the two characters \n: its `repr` without quotes.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) <= max_chars:
        return text
    return text[: max_chars - 1] + "…"


def load_corpus(
    settings: Settings,
    *,
    num_classes: int | None = None,
    commit: str = "",
    run: Path | None = None,
    note: Note = print,
) -> Corpus:
    """Make rows of tokens from the configured text, or open rows that were made before.

    Without separate held-out text, a fraction of the documents is held out, evenly along the
    reading order and independently of the seed; a single file of `data.source=text` has its end
    held out. A document is not trained on if a held-out document has the same tokens. With
    `data.num_sequences`, reading stops soon after there is enough text; labelled texts are all read
    and then drawn at random. Rows are kept in the user's cache under a hash of the settings that
    determine them.

    Args:
      settings: The run's settings.
      num_classes: Number of classes of labelled texts, which are not packed into rows; else None.
      commit: Commit of a data set on the hub. Empty: that of `data.revision` today.
      run: Folder of the run, whose exported model may have the tokenizer beside it.
      note: Called with each line to show to the user.

    Returns:
      The corpus, memory-mapped, in the smallest type that holds the ids.

    Raises:
      ConfigError: If keys contradict one another, the model lacks ids of the tokenizer, chats need
        a template and there is none, the hub has no such data set, or a server refuses access.
      DataError: If files are missing or damaged, or hold too little text to hold rows out, or for
        the first batches.
      ResourceError: If a server does not answer; if it is the hub, only if no rows of the data set
        were made before.
      OSError: If a file or folder of the text may not be read.
    """
    data = settings.data
    where = _where_of(data)
    tokenizer = tokenizer_of(data, settings.model, num_classes=num_classes, run=run)

    def job_of(commit: str) -> Job:
        """Return the job that makes rows of a commit; if it is empty, the hub is asked for one."""
        # Of a held-out split only as many rows are made as a run evaluates on: guard rows, and
        # those of the reported losses.
        return make_job(
            data,
            tokenizer,
            num_classes=num_classes,
            num_heldout_rows=MAX_GUARD_ROWS + settings.eval.num_sequences,
            commit=commit,
        )

    try:
        job = job_of(commit)
    except hub.Unreachable:
        # Which commit is the newest is not known. Rows of any commit do.
        wanted = job_of(_ANY_COMMIT).request

        def differs_in_commit_only(request: dict) -> bool:
            """Return whether rows of this request are the wanted ones, of some commit."""
            return request | {"commit": _ANY_COMMIT} == wanted

        prepared_rows = _find_rows(differs_in_commit_only)
        if prepared_rows is None:
            raise  # that the hub does not answer
        note(f"{where}: the hub does not answer; using the rows made last")
    else:
        prepared_rows = _prepare_rows(job, note)

    manifest = prepared_rows.manifest
    train = rows_as_read(prepared_rows.train, data)
    return Corpus(
        rows=train,
        heldout_rows=rows_as_read(prepared_rows.heldout, data),
        tokenizer=tokenizer,
        manifest=manifest,
        order=order_of(settings, len(train), where=where),
        tokens_per_byte=manifest.tokens_per_byte if num_classes is None else None,
    )


def rows_as_read(arrays: RowArrays, data: DataSettings) -> np.ndarray | DocumentRows:
    """Return rows in the form in which `Corpus.batch` reads them.

    `arrays` are those of the rows to train on, or of the held-out rows. The result is
    `DocumentRows` if the model separates documents, else the array of tokens.
    """
    if not data.separates_documents:
        return arrays.tokens
    assert arrays.starts is not None  # packed rows have them
    return DocumentRows(arrays.tokens, arrays.starts, arrays.answers)


def _prepare_rows(job: Job, note: Note) -> PreparedRows:
    """Make a job's rows in the user's cache, or open those that are there.

    A job describes the text, the tokenizer and the settings; `job.key` is a hash of all that
    determines the rows. If the cache cannot be written, rows are made in a folder that is deleted
    at once. The same is done if the source has no version: then it may yield another text the next
    time. `note` is called with each line to show to the user. Raises ConfigError, DataError or
    ResourceError if the text cannot be read or is too little.
    """
    if DATA_SOURCES[job.data.source].version is not None:
        try:
            folder = cache_folder("data") / job.key
            manifest = rows.prepare(job, folder, note=note)
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
            note(
                f"rows are kept for later runs, {num_bytes / 1e6:.1f} MB; to delete them: rm -r"
                f" {shlex.quote(str(folder))}"
            )
            return prepared.open_rows(folder, manifest)
        except OSError as error:
            note(f"rows cannot be kept for later runs ({error})")

    # The memory-mapped arrays stay readable after the folder is deleted.
    with tempfile.TemporaryDirectory(prefix="adloco-rows-") as temporary:
        folder = Path(temporary) / job.key
        manifest = rows.prepare(job, folder, note=note)
        return prepared.open_rows(folder, manifest)


def _where_of(data: DataSettings) -> str:
    """Return the "key=value" of the config that names the text."""
    return f"data.path={data.path}" if data.path else f"data.source={data.source}"


def _find_text(data: DataSettings) -> tuple[bool, dict[str, File], dict[str, File]]:
    """Find the files of the text.

    Returns:
      Whether the text is a data set on the hub; the files of the text; and those of separate
      held-out text. Files are in reading order; a key is the path relative to the folder. There are
      none if the text is on the hub, or if its source needs no path.

    Raises:
      ConfigError: If keys contradict one another, a file is in both, an address cannot be used, or
        a server refuses access.
      DataError: If a path or an address leads to no file.
      hub.Unreachable: If a server does not answer.
    """
    source = DATA_SOURCES[data.source]
    where = _where_of(data)
    # A path that does not exist may be a name on the hub, if this source reads the hub.
    on_hub = source.is_hub and is_on_hub(data.path, key="data.path")
    # Keys for files have no use on the hub, and the hub's keys none with files.
    if on_hub:
        has_wrong_keys = bool(data.heldout_path)
    else:
        has_wrong_keys = source.is_hub and bool(data.name or data.heldout_split)
    if has_wrong_keys:
        raise ConfigError(
            f"{where}: data.heldout_path is for files, data.name and data.heldout_split are for"
            " data sets on the hub; leave the other empty"
        )
    if on_hub or "path" not in source.needs:
        return on_hub, {}, {}

    files = find(data.path, key="data.path")
    heldout: dict[str, File] = {}
    if data.heldout_path:
        heldout = find(data.heldout_path, key="data.heldout_path")
    if "dataset_dict.json" in files:  # the library `datasets` writes it beside folders of splits
        raise ConfigError(
            f"{where}: a saved data set of several splits; name the folder of one split"
        )
    files = _files_with_rows(files)
    heldout = _files_with_rows(heldout)
    in_both = _without_links(files) & _without_links(heldout)
    if in_both:
        name = min(file.name for file in in_both)
        raise ConfigError(
            f"data.path={data.path} and data.heldout_path={data.heldout_path} both hold"
            f" {name}: text that is trained on cannot be held out"
        )
    return False, files, heldout


def _files_with_rows(files: dict[str, File]) -> dict[str, File]:
    """Return the .arrow files if there are any, else all files.

    A data set that the library `datasets` saved has rows only in its .arrow files.
    """
    arrow_files = {name: file for name, file in files.items() if name.endswith(".arrow")}
    return arrow_files or files


def _without_links(files: dict[str, File]) -> set[File]:
    """Return the files, with links replaced by the files to which they lead."""
    return {file.resolve() if isinstance(file, Path) else file for file in files.values()}


def source_of(path: str) -> str:
    """Return the `data.source` that reads a path, by its files' endings; hf for a name on the hub.

    Raises:
      ConfigError: If the files are of several kinds, the path is an address that cannot be used, or
        a server refuses access.
      DataError: If the path leads to no file and is not the name of a data set.
      hub.Unreachable: If the server of an address does not answer.
    """
    if is_on_hub(path, key="data.path"):
        return "hf"
    examples: dict[str, str] = {}  # a file for each source that would read some
    for name in find(path, key="data.path"):
        _, _, ending = name.lower().removesuffix(".gz").rpartition(".")
        examples.setdefault(_SOURCE_BY_ENDING.get(ending, "text"), name)
    if any(name.endswith(".arrow") for name in examples.values()):
        return "hf"  # a data set that the library `datasets` saved; it also has files in JSON
    if len(examples) > 1:
        raise ConfigError(
            f"data.path={path}: files of several kinds ({', '.join(examples.values())}); give a"
            " glob, or set data.source"
        )
    (source,) = examples  # `find` finds at least one file
    return source


def column_of_texts(data: DataSettings) -> str:
    """Return the `data.text_column` that fits the columns of a text's first row.

    It is the first of the usual names for chats (`CHATS`) whose columns are there, else "text". It
    is "text" also if no row can be read. If the hub does not answer, it is the column from which
    rows of this data set were made last.
    """
    source = DATA_SOURCES.get(data.source)
    if source is None or "text_column" not in source.needs:
        return "text"
    where = _where_of(data)
    try:
        on_hub, files, _ = _find_text(data)
        if on_hub:
            columns = sources.hub_columns(data, where=where)
        else:
            first_file = next(iter(files.values()), None)  # a source may read no file
            with hub.as_user_errors(where):  # a file may be on a server
                columns = sources.first_columns(source, first_file, data)
    except hub.Unreachable:
        prepared_rows = _find_rows(lambda request: request.get("path") == data.path)
        if prepared_rows is None:
            return "text"
        return prepared_rows.manifest.request["text_column"]
    except UserError:  # `load_corpus` reads the text again, and raises what is wrong with it
        return "text"
    for name in CHATS:
        # Some names join two columns of a chat by a plus, as prompt+completion.
        if {*name.split("+")} <= {*columns}:
            return name
    return "text"


def _find_rows(fits: Callable[[dict], bool]) -> PreparedRows | None:
    """Open the newest rows in the user's cache for whose request `fits` is true; None if none is.

    `fits(request)` is given a `Manifest.request`. Damaged rows are passed over.
    """
    manifests = cache_folder("data").glob(f"*/{prepared.MANIFEST}")
    for path in sorted(manifests, key=os.path.getmtime, reverse=True):
        with contextlib.suppress(DataError):  # damaged, or of another version
            manifest = prepared.read_prepared(path.parent)
            if fits(manifest.request):
                return prepared.open_rows(path.parent, manifest)
    return None


def make_job(
    data: DataSettings,
    tokenizer: Tokenizer,
    *,
    num_classes: int | None = None,
    num_heldout_rows: int | None = None,
    commit: str = "",
) -> Job:
    """Return the job that makes the rows of a text, with all settings that determine the rows.

    The text is found, but read only later, by the function `Job.parts`.

    Args:
      data: The config's group `data`.
      tokenizer: The configured tokenizer.
      num_classes: Number of classes of labelled texts, which are not packed into rows; else None.
      num_heldout_rows: Upper limit of rows from an unlabelled held-out split on the hub. None: all.
      commit: Commit of a data set on the hub. Empty: that of `data.revision` today.

    Raises:
      ConfigError: If keys contradict one another, a file is both trained on and held out, the hub
        has no such data set, or a server refuses access.
      DataError: If a path leads to no file.
      hub.Unreachable: If the hub or another server does not answer.
      OSError: If a file or folder may not be read.
    """
    source = DATA_SOURCES[data.source]
    where = _where_of(data)
    heldout_where = f"data.heldout_path={data.heldout_path}" if data.heldout_path else where
    if num_classes is None:  # no class is read, so that this column does not determine the rows
        data = data.model_copy(update={"label_column": ""})
    on_hub, files, heldout_files = _find_text(data)

    # Settings that follow from other things than the config.
    identities = [identity(file) for file in files.values()]  # lists: path, size in bytes, ...
    if on_hub and not commit:
        commit = data.revision
        if not hub.COMMIT.fullmatch(commit):  # a branch or a tag, whose commit may change
            where_revision = f"{where}, data.revision={data.revision}"
            commit = hub.commit_of(data.path, data.revision, where=where_revision)
    date = ""
    if data.is_chat and tokenizer.reads("strftime_now"):  # the template writes today's date
        date = data.date or datetime.date.today().isoformat()
    data = data.model_copy(update={"date": date})
    heldout_limit = None
    if on_hub and data.heldout_split and num_classes is None:
        heldout_limit = num_heldout_rows
    template_hash = ""
    if data.is_chat:
        template_hash = hashlib.sha256(tokenizer.template.encode()).hexdigest()

    request = {
        "name": data.name,
        "split": data.split,
        "heldout_split": data.heldout_split,
        "text_column": data.text_column,
        "label_column": data.label_column,
        "sequence_length": data.sequence_length,
        "num_sequences": data.num_sequences,
        "heldout_frac": data.heldout_frac,
        "skip_bad": data.skip_bad,
        "format": prepared.FORMAT,
        "source": [data.source, source.version],
        "path": data.path if on_hub else "",
        "commit": commit,
        "files": identities,
        "heldout_files": [identity(file) for file in heldout_files.values()],
        "num_classes": num_classes or 0,
        "loss": data.loss if data.is_chat else "",
        "template": template_hash,
        "date": date,
        "num_heldout_rows": heldout_limit or 0,
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eot_id],
        # Without files, the text is that of Python's library, or of a user's function.
        "python": "" if files or on_hub else _python_identity(),
    }
    # A single text may have to be cut in two, so that an end of it can be held out.
    num_texts = sum(1 for _, size, *_ in identities if size != 0)  # empty files are no text
    cuts = source.cuts_single_file and not heldout_files and num_texts == 1

    def hub_parts(split: str) -> list[Part]:
        """List the files of a split of the data set on the hub as parts; the hub is asked."""
        return sources.hub_parts(data, split, commit, where=where)

    def read_file(path: Any) -> Iterable[Row]:
        """Yield the rows of a file of this machine, as the source does.

        A text that is a single document gives two: its beginning to train on, and its end to hold
        out. `path` is None for a source that reads no file.
        """
        if cuts:
            return _cut_file(path, data)
        return source.documents(path, data)

    def file_parts(file_by_name: Mapping[str, File | None]) -> list[Part]:
        """List files of this machine or of a server as parts; `file_by_name` has them by name."""
        return [Part(name, file, read_file) for name, file in file_by_name.items()]

    def parts() -> tuple[list[Part], list[Part]]:
        """Return the parts of separate held-out text, which may be none, and of all other text.

        Raises ConfigError, DataError or hub.Unreachable if the data set on the hub is not readable.
        """
        if on_hub:
            heldout = hub_parts(data.heldout_split) if data.heldout_split else []
            return heldout, hub_parts(data.split)
        if not files:
            # The source reads no file: it is one part, called once with None.
            return [], file_parts({data.source: None})
        return file_parts(heldout_files), file_parts(files)

    return Job(
        data=data,
        encoder=tokenizer,
        num_classes=num_classes,
        request=request,
        parts=parts,
        where=(where, heldout_where),
        heldout_limit=heldout_limit,
        cuts=cuts,
    )


def _python_identity() -> str:
    """Return the version of Python, with a hash of the identities of its library's files."""
    files = json.dumps([identity(file) for file in sources.stdlib_files()])
    return f"{sys.version} {hashlib.sha256(files.encode()).hexdigest()}"


def _cut_file(file: Path, data: DataSettings) -> Iterator[str]:
    """Yield the beginning of a text file, to train on, and its end, to hold out; none if empty.

    Raises DataError if the file cannot be read, or has no line break to cut at.
    """
    text = sources.read_text(file)
    if text:
        yield from sources.cut_in_two(text, where=_where_of(data), heldout_frac=data.heldout_frac)
