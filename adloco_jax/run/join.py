"""Join a run as a learner: `adloco join`, and `adloco_jax.join` for runs of `fit`.

A learner is a process that trains workers for a driver, the process that holds the run. Both meet
in a bucket (a store of objects on the network), or the learner reaches the driver by a ticket, an
address that serves as a bucket here. A run of `fit` has a model and rows that its caller made, so
that settings alone do not describe it. The base is the frozen weights of a model with an adapter.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from adloco_jax.config import completed, validate
from adloco_jax.data.files import is_on_hub
from adloco_jax.data.formats import with_tuples
from adloco_jax.elastic.bucket_learner import BucketLearner, check_version, opened, read_run
from adloco_jax.elastic.files import ROWS, WEIGHTS, ServedRows, served_weights
from adloco_jax.elastic.learner import Learner, LearnerSetup
from adloco_jax.elastic.messages import Refused, RunDescription
from adloco_jax.elastic.store import Store
from adloco_jax.engine.inputs import Rows
from adloco_jax.engine.model import Model
from adloco_jax.engine.spec import this_machine
from adloco_jax.errors import ConfigError
from adloco_jax.host import processes
from adloco_jax.models.configured import class_count
from adloco_jax.run.before.assemble import assemble
from adloco_jax.settings import Settings

# Settings that name files, which may lie elsewhere on a learner's machine. `cli.parser` lists them
# too, as options.
OWN = ("data.path", "data.heldout_path", "data.tokenizer", "data.template", "model.init_from")

Parts = Callable[[Settings], tuple[Model, Rows]]
"""`parts(settings)`: model and rows of a run of `fit`, which the settings do not describe."""


def join(
    url: str,
    *,
    own: Mapping[str, str],
    accepts_data: bool = False,
    workdir: Path | None = None,
    patience_s: float = math.inf,
    parts: Parts | None = None,
    key: bytes | None = None,
    has_files: bool = False,
) -> None:
    """Train for a run until it is over, or a signal asks to leave.

    Files that the driver serves are read from it, unless `own` names them, they are on the hub, or
    this machine `has_files`.

    Args:
      url: The address of a bucket, or a ticket.
      own: This machine's values of settings in `OWN`, if they differ from the driver's.
      accepts_data: Whether data may be read at addresses that only the driver names.
      workdir: Folder for a log of the rows read; None: no log.
      patience_s: Seconds to wait for a driver that does not answer.
      parts: Makes model and rows of a run of `fit`; None: the run is one of `train`.
      key: Secret by which the driver of a ticket knows this learner; None: that of its user.
      has_files: Whether this machine has the driver's files at the same paths.

    Raises:
      ConfigError: If the bucket, ticket, key, version, data, weights or table entries do not fit,
        a setting breaks a rule, data would be read at an address that is not accepted, or a file
        that the driver serves is damaged.
      DataError: If this machine's data or weights are missing or damaged.
      ResourceError: If the driver cannot be reached, or after `patience_s` without it.
    """
    with opened(url, patience_s, key) as bucket:
        is_over = False
        while not is_over:  # a driver that begins another run, in place of this, is joined again
            with processes.stop_requests("leaving"):
                run = read_run(bucket)  # waits until a driver has written its description of a run
            if run is None:  # a signal came first
                return
            # From here on, messages are signed for this run, and those of other runs are refused.
            bucket.signatures.run = run.id
            try:
                setup = learner_setup(bucket, run, own, accepts_data, parts, has_files=has_files)
            except Refused as error:  # a file that the driver serves is not as it says
                raise ConfigError(
                    f"{bucket.url}: {error}; start the driver again, or give this machine the files"
                ) from error
            with processes.stop_requests("leaving when the round under way has ended"):
                learner = BucketLearner(bucket, Learner(setup), setup, workdir, run.id)
                is_over = learner.serve()  # trains; False: another run has begun there


def _is_on_hub(flat: Mapping[str, Any], key: str) -> bool:
    """Return whether the setting `key`, such as data.path, names something on the hub.

    `flat` has the values of settings by key. The hub is not asked. Raises DataError if the system
    cannot look for a file of that name.
    """
    name = flat.get(key)
    return bool(name) and is_on_hub(name, key=key)


def learner_setup(
    bucket: Store,
    run: RunDescription,
    own: Mapping[str, str],
    accepts: bool,
    parts: Parts | None,
    *,
    has_files: bool = False,
) -> LearnerSetup:
    """Build what a learner needs: settings, spec, data and frozen weights of the run.

    A driver that starts its learners by Ray would send all this. Here the driver's description of
    the run has the settings, and this machine reads data and weights itself, which must be those of
    the driver.

    Args:
      bucket: The open bucket, from which files are read that the driver serves.
      run: The driver's description of the run.
      own: This machine's values of settings in `OWN`.
      accepts: Whether data may be read at addresses that only the driver names.
      parts: Makes model and rows of a run of `fit`; None: the run is one of `train`.
      has_files: Whether this machine has the driver's files at the same paths.

    Raises:
      ConfigError: If version, data, weights or table entries are not those of the driver; `parts`
        is missing for a run of `fit`, or given for one of `train`; a setting breaks a rule; or an
        address is not accepted.
      DataError: If this machine's data or weights are missing or damaged.
      Refused: If a file that the driver serves is not as its description says.
      ResourceError: If the driver cannot be reached.
    """
    check_version(bucket, run.adloco_jax)
    if run.by_fit != (parts is not None):
        way = "train: write adloco join"
        if run.by_fit:
            way = "fit: call adloco_jax.join there"
        raise ConfigError(f"{bucket.url}: to join a run of {way}, with the driver's arguments")
    # The settings by key, such as data.path: the driver's, and in place of some this machine's.
    # The driver's came as JSON, which has lists where settings have tuples.
    values: dict[str, Any] = flatten_dict(with_tuples(run.settings), sep=".")
    values.update(own)

    # The kinds of files that are read from the driver: not what this machine or the hub has.
    served = set()
    if not has_files:
        served = {file.kind for file in run.files}
    # From its own text, with its own tokenizer or from the hub, this machine makes rows itself.
    if own.keys() & {"data.path", "data.tokenizer"} or _is_on_hub(values, "data.path"):
        served.discard(ROWS)
    if "model.init_from" in own or _is_on_hub(values, "model.init_from"):
        served.discard(WEIGHTS)
    if WEIGHTS in served:
        values["model.init_from"] = str(served_weights(bucket, run.files))

    # What is read at an address that the driver chose needs this machine's consent, because it is
    # read with this machine's credentials.
    read = [key for key in OWN if key not in own]
    if ROWS in served:  # the driver has made rows of the data already
        read = ["model.init_from"]
    foreign = [key for key in read if "://" in str(values.get(key))]
    # Of a run of `fit`, this machine's own code, `parts`, reads the data.
    if foreign and not (accepts or run.by_fit):
        named = ", ".join(f"{key} = {values[key]!r}" for key in foreign)
        raise ConfigError(
            f"{bucket.url}: the driver names {named}; to read there with this machine's"
            f" credentials, give --accept-data, or --config.{foreign[0]}"
        )

    # `reads=False`: the driver has found already what files tell, and its settings have it.
    settings = completed(validate(unflatten_dict(values, sep=".")), reads=False)
    model = None  # None, as for the rows: what the settings describe
    corpus = None
    if parts is not None:
        model, corpus = parts(settings)
    if ROWS in served:
        num_classes = class_count(settings.model)
        corpus = ServedRows(bucket, run.files, settings, num_classes=num_classes)
    # Put together like a run on this machine. Nothing is written to its folder, here `Path()`.
    own_run = assemble(
        settings, this_machine(), Path(), model=model, corpus=corpus, commit=run.commit
    )
    base = own_run.model.base
    if own_run.corpus.fingerprint != run.fingerprint:
        raise _other_files(bucket, "data", "data.path")
    if base.fingerprint != run.base:
        raise _other_files(bucket, "base weights", "model.init_from")
    return LearnerSetup(
        settings=settings,
        spec=own_run.spec,
        corpus=own_run.corpus,
        base=base,
        by_fit=run.by_fit,
    )


def _other_files(bucket: Store, what: str, key: str) -> ConfigError:
    """Return the error for data or base weights that differ from the driver's.

    `what` names them in words, and `key` is the setting that says where they are.
    """
    return ConfigError(
        f"{bucket.url}: the driver has other {what} than this machine; give it the same files,"
        f" by --config.{key} if they are elsewhere here"
    )
