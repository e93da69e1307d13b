"""Make rows from text: tokenise documents, hold some of them out, pack them into rows, save these.

Documents, each closed by an end-of-text token, are joined and cut every L+1 tokens, without padding
or overlap; where each begins is kept beside the rows. Chats are whole in a row, and padding fills
it. Labelled texts become one row `[label, number of tokens, tokens...]` each. L is
`data.sequence_length`.

A *side* is training text or held-out text. A *part* is a file of text, or of a data set on the hub.
Held-out text is *separate* if the config names files or a split for it; else some documents of the
text are held out. A token *counts* if the model is trained to predict it; of a chat only some do. A
*bad* row of a file has no proper text, and up to `data.skip_bad` of them are skipped. A chat is
*rejected* if its row has a column `label` that says false: its answer is an example of a bad one,
from which no method here learns. A *copy* has the same tokens as a held-out document.

The text is read part by part into a `_TokenisedText`, `_split` chooses the sides' documents, and
`_write_folder` writes rows. Axes of arrays: N all documents, D the documents of one side.
"""

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import filelock
import numpy as np
from tqdm import tqdm

from adloco_jax.data import chats, prepared, sources
from adloco_jax.data.disk import file_sha256, replaced_folder
from adloco_jax.data.files import File, local_copy
from adloco_jax.data.prepared import (
    FORMAT,
    HELDOUT,
    MANIFEST,
    TRAIN,
    ArrayFiles,
    FileRecord,
    Manifest,
    RowArrays,
)
from adloco_jax.data.sampling import permute
from adloco_jax.data.sources import Document, Part
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError, counted
from adloco_jax.settings import DataSettings

# Most held-out rows measure reported losses; guard rows decide about merges.
MIN_HELDOUT_ROWS = 2  # one for each use
NUM_FIELDS = 2  # integers before the tokens of a labelled row: class, number of real tokens

_FIRST_NOTE_S = 5.0  # until a line says how many documents have been read
CHUNK_CHARS = 2**20  # characters that are tokenised and saved at a time


@dataclasses.dataclass(frozen=True)
class Job:
    """The description of a preparation of rows: the text, the tokenizer and the settings.

    Attributes:
      data: The config's group `data`.
      encoder: The tokenizer.
      num_classes: Number of classes of labelled texts, which are not packed into rows; else None.
      request: All settings that determine the rows, as plain JSON.
      parts: A function that lists the parts of separate held-out text, which may be none, and the
        parts of all other text.
      where: The settings that name training text and held-out text, as "key=value", for messages.
      heldout_limit: Upper limit of rows from separate held-out text. None: all of it is read.
      cuts: Whether the text is a single document, which its part yields as two, of which the second
        is held out.
    """

    data: DataSettings
    encoder: Tokenizer
    num_classes: int | None
    request: dict
    parts: Callable[[], tuple[list[Part], list[Part]]]
    where: tuple[str, str]
    heldout_limit: int | None = None
    cuts: bool = False

    def documents(self, part: Part, path: File | None, where: str) -> Iterator[Document]:
        """Yield the documents of a part, in reading order.

        `path` is the part's file on this machine, None if it has none. `where` is the "key=value"
        of the config that names the text, for messages. Raises DataError if a file is damaged, or
        for a bad row; with `data.skip_bad` a bad row is a document with a `fault` instead. Raises
        ConfigError if chats need a template, and there is none.
        """
        return sources.documents_of(
            part.read(path),
            self.data,
            where=where,
            num_classes=self.num_classes,
            tokenizer=self.encoder,
        )

    @property
    def row_length(self) -> int:
        """Number of tokens in a packed row."""
        return self.data.sequence_length + 1

    def labelled_lengths(self, about: np.ndarray) -> np.ndarray:
        """Return the length of labelled texts in tokens, uncut, with prefix and suffix: int64 [N].

        Prefix and suffix are the tokens that the tokenizer puts around each text. `about` describes
        the texts, in the type `_DOCUMENT`.
        """
        # Without the end-of-text token, which only packed text needs. A bad row has length 0.
        text = np.maximum(about["length"] - 1, 0)
        return text + len(self.encoder.prefix) + len(self.encoder.suffix)

    @property
    def key(self) -> str:
        """Hash of all settings that determine the rows; the name of their folder in the cache."""
        content = json.dumps(self.request, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()[:32]  # shorter, and still unique


def prepare(job: Job, folder: Path, *, note: Callable[[str], None] = print) -> Manifest:
    """Make a folder of rows; a finished folder is not changed.

    The rows depend on `job.request` and the text alone. A folder that is there is complete, as it
    gets its name last. If several processes prepare the same folder, one makes it and the others
    wait. Memory: a million characters, or one longer document, and 50 bytes per document. `note` is
    called with each line to show to the user.

    Raises:
      ConfigError: If the finished folder was made for other settings, or contains other files; if
        chats need a template, and there is none.
      DataError: If text is missing or damaged, or there is too little text; if the description in a
        finished folder is damaged.
      ResourceError: If a server with text does not answer.
      OSError: If the folder cannot be written.
    """
    manifest = _finished(folder, job.request)
    if manifest is not None:
        return manifest
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        note(f"waiting for another process that prepares the same rows ({folder})")
        held = lock.acquire()
    with held:  # the lock is released at the end
        manifest = _finished(folder, job.request)  # another process may have made it meanwhile
        if manifest is None:
            # The file of tokens may be large, so it is on the disk of the rows. It has no name.
            with replaced_folder(folder) as partial, tempfile.TemporaryFile(dir=partial) as file:
                text = _TokenisedText(file)
                _tokenise(job, text, partial / "copy", note)
                manifest = _write_folder(job, text, partial)
        Path(lock.lock_file).unlink(missing_ok=True)  # a finished folder needs no lock any more
    return manifest


def _finished(folder: Path, request: dict) -> Manifest | None:
    """Return the description of a finished folder; None if the folder is missing or empty.

    `request` has the settings that determine the rows. Raises ConfigError if the folder has
    something else, or rows of another request, and DataError if its description is damaged.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    refusal = "it is never overwritten: name another folder"
    if not prepared.is_prepared(folder):
        raise ConfigError(f"{folder}: has other files; {refusal}")
    manifest = prepared.read_prepared(folder)
    made_with = manifest.request
    all_keys = made_with | request  # another version may have other keys
    keys = [key for key in all_keys if made_with.get(key) != request.get(key)]
    if keys:
        raise ConfigError(
            f"{folder}: was made with another setting of {', '.join(keys)}; {refusal}"
        )
    return manifest


# -- Reading and tokenising ------------------------------------------------------------------

_DOCUMENT = np.dtype(
    [
        # Number of tokens that are saved. Of a text all of them, and the end of text; of a chat at
        # most a row, and zero if none counts.
        ("length", "<i8"),
        ("counted", "<i8"),  # how many of these count in the loss
        ("num_bytes", "<i8"),  # UTF-8 bytes for which the tokens that count stand
        ("digest", "<u8"),  # hash of all token ids, without the end of text, to find copies
        ("label", "<i8"),  # the class; 0 without classes
        ("side", "<i8"),  # `_HELDOUT` if the document is from separate held-out text, else `_TRAIN`
        ("only_last", "?"),  # of a chat: only its last answer counts (`chats.Answers`)
        ("rejected", "?"),  # of a chat: its answer is a bad one (`chats.Answers.is_rejected`)
        ("cut", "?"),  # of a chat: it was longer than a row
        ("bad", "?"),  # a row without text, which was skipped (`data.skip_bad`)
    ]
)
"""The description of a document."""
_TOKEN = np.dtype([("id", "<i4"), ("counts", "?")])  # `counts`: whether its loss does
# The two sides, as positions in `Job.where`.
_TRAIN = 0
_HELDOUT = 1


class _TokenisedText:
    """The documents that were read: their tokens, in a file, and a description of each.

    Attributes:
      files: Records of the parts that were read.
      unread: Names of columns and fields of chats that nothing reads (`chats.Answers.unread`).
      num_tokens: Number of tokens of all documents.
      num_bad: Number of bad rows that were skipped.
    """

    def __init__(self, file: IO[bytes]):
        """Begin without documents; `file` is empty, and open for writing and reading."""
        self._file = file
        self._about = [np.empty(0, _DOCUMENT)]  # so that arrays can be joined without a document
        self.files: list[FileRecord] = []
        self.unread: set[str] = set()
        self.num_tokens = 0
        self.num_bad = 0

    @property
    def about(self) -> np.ndarray:
        """The description (`_DOCUMENT`) of each document, [N]."""
        return np.concatenate(self._about)

    def add(self, tokens: np.ndarray, about: np.ndarray) -> None:
        """Save the tokens of some more documents.

        `tokens` has the type `_TOKEN`, all documents joined. `about` has the type `_DOCUMENT`, one
        element for each document.
        """
        self._file.write(tokens.tobytes())
        self._about.append(about)
        self.num_tokens += len(tokens)

    def pieces(self) -> Iterator[tuple[np.ndarray, slice]]:
        """Yield the joined tokens (`_TOKEN`) of some documents at a time, as `add` was given them.

        With them comes the slice of `about` that describes these documents.
        """
        self._file.seek(0)
        first = 0
        for about in self._about:
            content = self._file.read(int(about["length"].sum()) * _TOKEN.itemsize)
            yield np.frombuffer(content, _TOKEN), slice(first, first + len(about))
            first += len(about)


def _tokenise(job: Job, text: _TokenisedText, copy: Path, note: Callable[[str], None]) -> None:
    """Read all text that is needed, and add its documents to `text`.

    `copy` is the path of a folder that is made for the copy of a remote file, and `note` is called
    with each line to show to the user.

    Raises:
      DataError: If a side that has parts has no document, a file is damaged, there are more bad
        rows than `data.skip_bad`, or the tokenizer gives an id beyond its vocabulary.
      ConfigError: If chats need a template, and there is none; if a server refuses access.
      ResourceError: If a server does not answer.
    """
    heldout_parts, other_parts = job.parts()
    start_s = time.monotonic()
    next_note_s = _FIRST_NOTE_S  # seconds after the start
    num_documents = 0

    def count() -> None:
        """Count a document; where no terminal shows the bar, report the number occasionally."""
        nonlocal num_documents, next_note_s
        num_documents += 1
        passed_s = time.monotonic() - start_s
        if bar.disable and passed_s >= next_note_s:  # no bar is shown
            next_note_s = 2 * passed_s  # more and more rarely
            note(f"preparing rows: {counted(num_documents, 'document')} read in {passed_s:.0f} s")

    # `disable=None` disables the bar where there is no terminal. Separate held-out text is read
    # first, as `_is_enough` expects.
    with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
        for side, parts in ((_HELDOUT, heldout_parts), (_TRAIN, other_parts)):
            _tokenise_side(job, text, parts, side=side, copy=copy, bar=bar, count=count)
            if parts and not (text.about["side"] == side).any():
                raise DataError(no_text(job.where[side]))


def no_text(where: str) -> str:
    """Return the message for a text that has no document; `where` is the "key=value" of it."""
    return f"{where}: no text in it, need at least one document that is not empty"


def _tokenise_side(
    job: Job,
    text: _TokenisedText,
    parts: list[Part],
    *,
    side: int,
    copy: Path,
    bar: tqdm,
    count: Callable[[], None],
) -> None:
    """Read the parts of a side in order until there is enough text, and add their documents.

    Documents of about `CHUNK_CHARS` characters are collected, tokenised together and added. Whether
    there is enough is asked after each of these chunks.

    Args:
      job: What to prepare.
      text: Gets the documents, and a record of each file that is read. It has those of the side
        that was read before.
      parts: The parts of separate held-out text, or of all other text.
      side: `_HELDOUT` for separate held-out text, else `_TRAIN`.
      copy: Path of a folder that is made for the copy of a remote file.
      bar: Shows the number of tokens so far.
      count: Called for each document that is read.

    Raises:
      DataError: If there are more bad rows than `data.skip_bad`, a file is damaged, or the
        tokenizer gives an id beyond its vocabulary.
      ConfigError: If chats need a template, and there is none; if a server refuses access.
      ResourceError: If a server does not answer.
    """
    pending: list[Document] = []  # not tokenised yet
    num_chars = 0  # of the pending documents
    has_enough = False

    def add_pending() -> None:
        """Tokenise the pending documents together, and add them to `text`."""
        nonlocal num_chars
        for document in pending:
            text.unread.update(document.answers.unread)  # names of columns that nothing reads
        tokens, about = _encode(pending, job, side)
        text.add(tokens, about)
        bar.update(text.num_tokens - bar.n)  # to all tokens so far
        pending.clear()
        num_chars = 0

    for index, part in enumerate(parts, 1):
        bar.set_description(f"file {index} of {len(parts)}", refresh=False)
        with local_copy(part.file, copy) as path:
            documents = job.documents(part, path, job.where[side])
            num_documents = 0  # of this part
            for document in documents:
                num_documents += 1
                count()
                if document.fault:
                    text.num_bad += 1
                if text.num_bad > job.data.skip_bad:  # the number of bad rows that may pass
                    why = f"row {text.num_bad} that is bad, and data.skip_bad={job.data.skip_bad}"
                    raise DataError(f"{document.fault}; {why}")

                pending.append(document)
                num_chars += len(document.text)
                if num_chars >= CHUNK_CHARS:
                    add_pending()
                    has_enough = _is_enough(job, text, side)
                    if has_enough:
                        break

            # A file is read to its end even if there is enough text, so that it is counted whole,
            # and because gzip has its checksum there.
            if path is not None:
                num_documents += sum(1 for _ in documents)
            text.files.append(_file_record(part.name, path, num_documents))
        if has_enough:
            break
    add_pending()


def _is_enough(job: Job, text: _TokenisedText, side: int) -> bool:
    """Return whether the rest of a side need not be read: its documents fill the wanted rows.

    Separate held-out text (`side` is `_HELDOUT`) is read first, so that `text` has nothing else
    then. Of all other text (`_TRAIN`) there must be enough to train on after documents are held
    out, and enough held out.
    """
    if job.num_classes is not None:
        return False  # labelled texts are all read, and then drawn at random
    if side == _HELDOUT:
        num_rows = job.heldout_limit
    else:
        num_rows = job.data.num_sequences
    if num_rows is None:
        return False  # all text is wanted
    needed = num_rows * job.row_length  # tokens
    if text.num_tokens < needed:
        return False
    if side == _HELDOUT:
        return True  # all of it is held out

    # These tokens may still be too few: some documents are held out, and copies of these left out.
    about = text.about
    masks = _split(job, about)
    train = about["length"][masks.train].sum()
    heldout = about["length"][masks.heldout].sum()
    return train >= needed and heldout >= MIN_HELDOUT_ROWS * job.row_length


def _encode(documents: Sequence[Document], job: Job, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise documents; return the tokens to keep, joined, and a description of each document.

    The first result has the type `_TOKEN`, the second `_DOCUMENT`. A chat, which was tokenised when
    it was read, is cut to the length of a row, and to nothing if then no token counts. `side` is
    `_HELDOUT` or `_TRAIN`. Raises DataError if the tokenizer gives an id that is not below its
    `vocab_size`.
    """
    encoder = job.encoder
    texts = [document.text for document in documents]
    answers = [document.answers for document in documents]
    about = np.zeros(len(texts), _DOCUMENT)

    # Of each document: all ids, those to keep (`pieces`), and which of these count (`marks`).
    if job.data.is_chat:
        all_ids = [chat.ids for chat in answers]
        pieces = []
        marks = []
        for index, (text, chat) in enumerate(zip(texts, answers, strict=True)):
            mark = chats.tokens_in_spans(chat.offsets, chat.spans)[: job.row_length]
            if not mark.any():
                mark = mark[:0]  # nothing to learn: the chat is left out
            piece = chat.ids[: len(mark)]
            if len(piece):
                is_cut = len(piece) < len(chat.ids)
                limit = len(text)  # where the text ends, in characters
                if is_cut:
                    limit = int(chat.offsets[len(piece) - 1, 1])  # after the last kept token
                about["cut"][index] = is_cut
                # Of the parts that count, up to the cut, without ends of text.
                about["num_bytes"][index] = chats.num_bytes(text, chat.contents, limit)
            pieces.append(piece)
            marks.append(mark)
    else:
        all_ids = encoder.encode_batch(texts)
        pieces = [np.append(ids, np.int32(encoder.eot_id)) for ids in all_ids]
        for index, document in enumerate(documents):
            if document.fault:  # a bad row has no text, and gets no end of text
                pieces[index] = pieces[index][:0]
        marks = [np.ones(len(piece), bool) for piece in pieces]
        about["num_bytes"] = [len(text.encode()) for text in texts]

    # Describe the documents. Copies are found by a hash of all ids.
    for index, ids in enumerate(all_ids):
        digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8).digest()  # an uint64
        about["digest"][index] = int.from_bytes(digest, "little")
    about["label"] = [document.label for document in documents]
    about["bad"] = [document.fault != "" for document in documents]
    about["only_last"] = [chat.only_last for chat in answers]
    about["rejected"] = [chat.is_rejected for chat in answers]
    about["side"] = side
    about["length"] = [len(piece) for piece in pieces]
    about["counted"] = [mark.sum() for mark in marks]

    # Join the tokens. The empty arrays are for the case that there is no document.
    tokens = np.empty(about["length"].sum(), _TOKEN)
    tokens["id"] = np.concatenate([np.empty(0, np.int32), *pieces])
    tokens["counts"] = np.concatenate([np.empty(0, bool), *marks])
    least = tokens["id"].min(initial=0)
    largest = tokens["id"].max(initial=0)
    if not 0 <= least <= largest < encoder.vocab_size:
        raise DataError(
            f"data.tokenizer={encoder.name}: gives ids from {least} to {largest}, "
            f"need 0 to {encoder.vocab_size - 1}"
        )
    return tokens, about


def _file_record(name: str, path: Path | None, num_documents: int) -> FileRecord:
    """Return the record of a part that was read, with size and hash of its file if it has one."""
    if path is None:  # of a data set on the hub, or of a source without files
        return FileRecord(name=name, rows=num_documents)
    return FileRecord(
        name=name, rows=num_documents, bytes=path.stat().st_size, sha256=file_sha256(path)
    )


# -- Holding out -----------------------------------------------------------------------------


def is_heldout(count: int, heldout_frac: float) -> np.ndarray:
    """Return for each of `count` documents, in reading order, whether it is held out: bool [count].

    Of the first n documents, for each n, round(n · heldout_frac) are held out. So documents that
    are added to the end of the text do not change the choice.
    """
    # Entry n: how many of the first n documents are held out. Each is where this number rises.
    num_heldout = np.floor(np.arange(count + 1) * heldout_frac + 0.5)
    return np.diff(num_heldout) > 0


class _Masks(NamedTuple):
    """Which documents are trained on and which are held out, bool [N] each; some are neither."""

    train: np.ndarray
    heldout: np.ndarray


def _split(job: Job, about: np.ndarray) -> _Masks:
    """Choose the documents to train on and those to hold out; `about` describes all (`_DOCUMENT`).

    Held out is the separate held-out text; without one, a fraction of the documents of each class.
    Documents that have the same tokens as a held-out one are in neither mask, nor are documents
    without tokens.
    """
    heldout = about["side"] == _HELDOUT
    has_tokens = about["length"] > 0
    has_own_heldout = heldout.any()
    if job.cuts and not has_own_heldout:
        heldout = np.arange(len(about)) == 1  # the second of the two parts of the document
    elif not has_own_heldout:
        for label in np.unique(about["label"]):  # only 0 if texts have no classes
            of_label = np.flatnonzero((about["label"] == label) & has_tokens)
            heldout[of_label] = is_heldout(len(of_label), job.data.heldout_frac)
    is_new = ~np.isin(about["digest"], about["digest"][heldout])  # no copy of a held-out one
    return _Masks(train=~heldout & is_new & has_tokens, heldout=heldout & has_tokens)


# -- Rows ------------------------------------------------------------------------------------


def _write_folder(job: Job, text: _TokenisedText, folder: Path) -> Manifest:
    """Write rows of all documents into a folder that exists, and their manifest, which is returned.

    Raises DataError if a side has too few rows, or no labelled text of some class.
    """
    encoder = job.encoder
    about = text.about
    is_packed = job.num_classes is None
    masks = _split(job, about)

    # Documents that give no rows: bad ones, rejected chats, chats without an answer, and copies.
    # Only the copies have tokens.
    is_empty = about["length"] == 0
    rejected = int(about["rejected"].sum())
    dropped = int(is_empty.sum()) - text.num_bad - rejected
    num_used = masks.train.sum() + masks.heldout.sum()
    copies = int((~is_empty).sum() - num_used)  # all others with tokens are on a side

    if is_packed:
        _write_packed(job, text, folder, masks)
        is_cut = about["cut"]
    else:
        _write_labelled(job, text, folder, masks)
        is_cut = job.labelled_lengths(about) > job.data.sequence_length
    names = prepared.array_names(is_packed=is_packed, is_chat=job.data.is_chat)
    arrays = {name: np.load(folder / name, mmap_mode="r") for name in names}
    _require_rows(job, about, masks, arrays, copies=copies, dropped=dropped, rejected=rejected)

    def num_documents(files: ArrayFiles) -> int:
        """Return the number of documents in the rows of a side, whose files are named."""
        return RowArrays(
            arrays[files.tokens], arrays.get(files.starts), arrays.get(files.answers)
        ).num_documents

    heldout_tokens = about["counted"][masks.heldout].sum()
    heldout_bytes = about["num_bytes"][masks.heldout].sum()
    manifest = Manifest(
        format=FORMAT,
        request=job.request,
        tokenizer=encoder.name,
        fingerprint=encoder.fingerprint,
        vocab_size=encoder.vocab_size,
        eot_id=encoder.eot_id,
        shapes=[list(array.shape) for array in arrays.values()],
        hashes=[file_sha256(folder / name) for name in names],
        documents=[num_documents(TRAIN), num_documents(HELDOUT)],
        tokens_per_byte=float(heldout_tokens / max(1, heldout_bytes)),  # texts may be empty
        files=text.files,
        copies=copies,
        truncated=int(is_cut.sum()),
        dropped=dropped,
        only_last=int(about["only_last"].sum()),
        rejected=rejected,
        bad=text.num_bad,
        unread=sorted(text.unread),
    )
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(exclude_none=True)) + "\n")
    return manifest


def _require_rows(
    job: Job,
    about: np.ndarray,
    masks: _Masks,
    arrays: dict[str, np.ndarray],
    *,
    copies: int,
    dropped: int,
    rejected: int,
) -> None:
    """Raise DataError, which says what was left out and cut, unless both sides have enough rows.

    One row is enough to train on, and `MIN_HELDOUT_ROWS` to hold out.

    Args:
      job: What was prepared.
      about: Descriptions of all documents (`_DOCUMENT`).
      masks: The documents of each side.
      arrays: The arrays of the folder, by the names of their files.
      copies: Number of documents with the same tokens as a held-out one.
      dropped: Number of chats without an answer in a row's length.
      rejected: Number of chats whose row says by the column `label` that the answer is a bad one.
    """
    left_out = f"({copies} copies of held-out ones"
    if dropped + rejected:
        left_out += f" and {dropped + rejected} chats without an answer"
    if dropped:
        left_out += " within data.sequence_length"
    left_out += " are left out)"
    num_cut = int(about["cut"].sum())
    if num_cut:
        left_out += f"; {counted(num_cut, 'chat')} are longer than a row and were cut; a chat gives"
        left_out += " at most one row"

    def check(where: str, tokens: np.ndarray, use: str, mask: np.ndarray, need: int) -> None:
        """Raise DataError if a side has fewer than `need` rows.

        `where` names its text, `tokens` are its rows, `use` says what they are for, and `mask`
        which documents are on it.
        """
        if len(tokens) < need:
            raise DataError(
                f"{where}: too little text: have {counted(len(tokens), 'row')} of"
                f" {tokens.shape[1]} tokens to {use}, in {mask.sum()} of {len(about)} documents"
                f" {left_out}, need {need};"
                " give more text or documents, another data.heldout_frac, separate held-out text"
                " (data.heldout_path), or a smaller data.sequence_length"
            )

    check(job.where[_TRAIN], arrays[TRAIN.tokens], "train on", masks.train, 1)
    heldout = arrays[HELDOUT.tokens]
    check(job.where[_HELDOUT], heldout, "hold out", masks.heldout, MIN_HELDOUT_ROWS)


@dataclasses.dataclass(frozen=True)
class _PackedSide:
    """The rows of one side, as files to be written, and the place of each document in them.

    Attributes:
      first_N: For each document the index of its first token in the flattened rows; the size of the
        rows, after their end, if the document is not on this side.
      ids: Rows of token ids [num_rows, L + 1], memory-mapped.
      counts: Rows of bool in the same shape, which say whether a token counts, memory-mapped. None
        if all tokens count.
    """

    first_N: np.ndarray
    ids: np.ndarray
    counts: np.ndarray | None


def _write_packed(job: Job, text: _TokenisedText, folder: Path, masks: _Masks) -> None:
    """Write both sides' rows of documents one after another, or of whole chats, into a folder.

    `masks` says which documents are on each side. The files that are written are `TRAIN`'s and
    `HELDOUT`'s, without `answers` (which tokens count) if the documents are not chats.
    """
    lengths_N = text.about["length"]
    # Create the files, whose arrays are memory-mapped, and choose the place of each document.
    train = _lay_out(
        job, lengths_N, masks.train, folder=folder, files=TRAIN, limit=job.data.num_sequences
    )
    heldout = _lay_out(
        job, lengths_N, masks.heldout, folder=folder, files=HELDOUT, limit=job.heldout_limit
    )
    # Write the tokens of some documents at a time to their places.
    for tokens, which in text.pieces():
        lengths = lengths_N[which]
        offsets = np.cumsum(lengths) - lengths  # of each document's first token in `tokens`
        for side in (train, heldout):
            # The index of each token in the flattened rows of this side: it lies as far after its
            # document's first token there as in `tokens`. It is past the rows' end if the document
            # is on the other side, or after the last full row.
            index = np.repeat(side.first_N[which] - offsets, lengths) + np.arange(len(tokens))
            fits = index < side.ids.size
            side.ids.reshape(-1)[index[fits]] = tokens["id"][fits]
            if side.counts is not None:
                side.counts.reshape(-1)[index[fits]] = tokens["counts"][fits]


def _lay_out(
    job: Job,
    lengths_N: np.ndarray,
    mask_N: np.ndarray,
    *,
    folder: Path,
    files: ArrayFiles,
    limit: int | None,
) -> _PackedSide:
    """Choose the place of each document of a side in rows, and make the side's files in `folder`.

    Args:
      job: What to prepare.
      lengths_N: Number of tokens of each document.
      mask_N: Whether a document is on this side.
      folder: An existing folder.
      files: Names of the side's files. That of starts is written here. The others are created, and
        the caller writes the documents into them.
      limit: Upper limit of rows; documents after it are left out. None: no limit.
    """
    width = job.row_length
    length_D = lengths_N[mask_N]
    # The index of each document's first token in the flattened rows.
    if job.data.is_chat:
        row_D, offset_D = pack(length_D, width)  # each chat's row, and where it begins there
        first_D = row_D * width + offset_D
        num_rows = int(row_D.max(initial=-1)) + 1  # 0 if there is no chat
    else:
        first_D = np.cumsum(length_D) - length_D
        num_rows = int(length_D.sum()) // width
    if limit is not None:
        num_rows = min(num_rows, limit)
    shape = (num_rows, width)

    id_dtype = prepared.row_dtype(job.encoder.vocab_size, labelled=False)
    ids = np.lib.format.open_memmap(folder / files.tokens, "w+", id_dtype, shape)
    if job.data.is_chat:
        counts = np.lib.format.open_memmap(folder / files.answers, "w+", np.bool_, shape)
        # Padding is a document of its own, in which nothing counts. It begins where a chat ends,
        # unless another chat begins there.
        ids[:] = job.encoder.eot_id
        starts = np.union1d(first_D, first_D + length_D)
    else:
        counts = None
        # A document begins with the end of text from which its first token is predicted.
        starts = np.maximum(first_D - 1, 0)
    np.save(folder / files.starts, starts[starts < ids.size])  # others are after the last row

    first_N = np.full(len(lengths_N), ids.size)  # after the end: not on this side
    first_N[mask_N] = first_D
    return _PackedSide(first_N, ids, counts)


def pack(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents of 1 to `width` tokens to rows of `width` tokens.

    `lengths` [D] are the documents' numbers of tokens. Returns each document's row, and the
    position of its first token in the row, both int64 [D]. In order, a document goes to the row
    with the least space that holds it (best fit), else to a new row.
    """
    rows = np.zeros(len(lengths), np.int64)
    offsets = np.zeros(len(lengths), np.int64)
    num_rows = 0
    open_rows: list[list[int]] = [[] for _ in range(width + 1)]  # by the space that is left
    spaces = 0  # bit s is set if a row with space s is open; so the search takes one operation
    for index, length in enumerate(lengths.tolist()):  # integers of Python, whatever their size
        fitting_spaces = spaces >> length << length  # clear the bits of spaces below `length`
        if fitting_spaces:
            lowest_bit = fitting_spaces & -fitting_spaces  # all others are cleared
            space = lowest_bit.bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces &= ~(1 << space)
        else:
            space = width
            row = num_rows
            num_rows += 1
        rows[index] = row
        offsets[index] = width - space
        space -= length
        if space > 0:
            open_rows[space].append(row)
            spaces |= 1 << space
    return rows, offsets


def _write_labelled(job: Job, text: _TokenisedText, folder: Path, masks: _Masks) -> None:
    """Write one row [class, n, tokens...] for each labelled text, into both sides' files.

    `masks` says which texts are on each side. The n tokens include prefix and suffix; zeros follow.
    Long texts lose their end. Raises DataError if a class has no text on a side.
    """
    about = text.about
    max_tokens = job.data.sequence_length
    prefix = job.encoder.prefix
    suffix = job.encoder.suffix
    lengths = np.minimum(job.labelled_lengths(about), max_tokens)

    # Rows have room for the longest text: a power of two, or three quarters of one, but at most
    # `max_tokens`. So texts of about the same length have rows of the same shape, and the programs
    # that read them are compiled once.
    longest_text = int(lengths.max())
    room = 1 << (longest_text - 1).bit_length()  # the least power of two that is large enough
    if longest_text <= room * 3 // 4:
        room = room * 3 // 4
    rows = np.zeros((len(about), NUM_FIELDS + min(room, max_tokens)), np.int32)
    rows[:, 0] = about["label"]
    rows[:, 1] = lengths
    for tokens, which in text.pieces():
        # The index of each document's first token in `tokens`; `rows[which]` is a view, in which
        # the rows are written.
        starts = np.cumsum(about["length"][which]) - about["length"][which]
        for row, start, length in zip(rows[which], starts, lengths[which], strict=True):
            ids = tokens["id"][start : start + length - len(prefix) - len(suffix)]
            row[NUM_FIELDS : NUM_FIELDS + length] = [*prefix, *ids, *suffix]

    def save(path: Path, chosen: np.ndarray, where: str) -> None:
        """Save the rows of a side, if each class has some; `where` names its text in messages."""
        assert job.num_classes is not None  # the texts are labelled
        counts = np.bincount(chosen[:, 0], minlength=job.num_classes)
        if counts.min() < 1:
            raise DataError(
                f"{where}: have {', '.join(map(str, counts))} texts of classes 0 to"
                f" {len(counts) - 1}, need some of each to train on and to hold out; check"
                f" model.num_classes={len(counts)}, or give more text"
            )
        np.save(path, chosen)

    train = rows[masks.train]
    if job.data.num_sequences is not None:
        train = _draw(train, job.data.num_sequences)
    save(folder / TRAIN.tokens, train, job.where[_TRAIN])
    save(folder / HELDOUT.tokens, rows[masks.heldout], job.where[_HELDOUT])


def _draw(rows: np.ndarray, limit: int) -> np.ndarray:
    """Return up to `limit` rows, drawn at random and in their order.

    They are not the first, because files are often sorted by class. The choice depends only on
    `limit` and the number of rows.
    """
    limit = min(limit, len(rows))
    same_key = np.zeros(1, np.uint64)  # so that no seed changes the choice
    drawn = permute(np.arange(limit), num_items=len(rows), key=same_key)
    return rows[np.sort(drawn)]
