"""Make the default config of a run, check a config, and report all faults.

A config file calls `default_config()`, a locked ConfigDict of the options in `adloco_jax.settings`,
and changes some. `validate` turns it into a `Config`, and `completed` finds what that leaves unset:
the `Settings` that all other modules read.

A fault is what is wrong with an option, in words; a rule says which options go together. A table
maps names to what an option can name, such as optimizers. A run's record is `config.json` in its
folder, with the settings that it began with. A trainer is a model in training; its workers train
copies of it. A learner is a process that trains workers. A micro-batch is the part of a worker's
batch that a device takes at once.
"""

import contextlib
import datetime
import difflib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ml_collections import ConfigDict, FieldReference
from pydantic import ValidationError

from adloco_jax.errors import ConfigError
from adloco_jax.settings import (
    FOUND,
    GROUPS,
    OPTIONS,
    BatchingSettings,
    Config,
    DataSettings,
    EngineSettings,
    EnsembleSettings,
    ModelSettings,
    Settings,
    default_of,
    shown,
)

_FEWEST_LEARNERS = 2  # of a run that says neither how many learners nor how many workers it has

executed: list[Path] = []
"""Config files that this process has run; they may have added entries to tables."""


def default_config() -> ConfigDict:
    """Return a locked config in which every option has its default value, or is unset.

    An unset option is None or "auto", and accepts a value of its type.
    """
    config = ConfigDict({group: {} for group in GROUPS})
    for key in OPTIONS:
        group, _, name = key.rpartition(".")
        value = default_of(key)
        if value is None:  # the field must accept a value of its type
            value = FieldReference(None, field_type=plain_type(key))
        elif value == "auto":  # the field must accept a value of another type, so of any
            value = FieldReference("auto", field_type=object)
        if group:
            config[group][name] = value
        else:
            config[name] = value
    return config.lock()


def plain_type(key: str) -> Any:
    """Return the type of an option that is set, without its limits: int for `Count | None`."""
    group, _, name = key.rpartition(".")
    kind = get_type_hints(GROUPS.get(group, Settings))[name]
    if type(None) in get_args(kind):  # None comes last
        return get_args(kind)[0]
    return kind


def validate(config: ConfigDict | Mapping[str, Any] | Config) -> Config:
    """Check a whole config, and return its values; reads no file.

    Args:
      config: Groups and options as in `default_config()`, as a ConfigDict or nested dicts. One that
        is missing has its default. Checked configs and settings are returned as they are.

    Returns:
      The config, for which `completed` finds what it leaves unset.

    Raises:
      ConfigError: With a line for each option that is unknown, of a wrong type, out of range or
        contradicts another.
    """
    if isinstance(config, Config):
        return config
    if not isinstance(config, ConfigDict | Mapping):
        need = "must be a config; start from default_config()"
        raise ConfigError(f"config = {shown(config)}: {need}")
    # A copy as plain dicts, from which options can be taken. A key with a dot, as in "inner.tx", is
    # let through here, so that it is reported below with all other faults.
    written = ConfigDict(dict(config), allow_dotted_keys=True).to_dict()
    no_options: dict[str, Any] = {group: {} for group in GROUPS}  # all have their defaults
    values = no_options | written
    # A config leaves an option that `completed` finds at None; a model of pydantic lacks it.
    for key in FOUND:
        group, _, name = key.partition(".")
        options = values[group]
        if isinstance(options, dict) and name in options and options[name] is None:
            del options[name]

    faults: list[str] = []
    wrong: list[str] = []  # how lines about options begin whose type or limit is wrong
    try:
        settings = Config.model_validate(values)
    except ValidationError as error:  # of types and limits, which need no tables
        faults = worded(error)
        # The faulty options are taken out, so that they have their defaults.
        for fault in error.errors():
            loc = [str(part) for part in fault["loc"]]  # such as ["inner", "tx"]
            if len(loc) == 1:  # a group, or an option of none
                values.pop(loc[0], None)
                wrong.append(f"{loc[0]} = ")
            else:
                values[loc[0]].pop(loc[1], None)
                wrong.append(f"{loc[0]}.{loc[1]} = ")
        # Check the rules of all other options too.
        settings = Config.model_validate(no_options | values)
    rules = settings.faults(tables())
    # A broken rule about an option with a fault is left out: it is about the option's default.
    faults += [line for line in rules if not any(key in line for key in wrong)]
    if faults:
        raise ConfigError("\n".join(faults))
    return settings


def tables() -> dict[str, Mapping[str, Any]]:
    """Return the public tables that options name, with the entries that config files have added."""
    # Imported only here, because they import JAX.
    from adloco_jax import contrib
    from adloco_jax.core.batching import BATCH_TESTS
    from adloco_jax.core.merge import MERGE_POLICIES
    from adloco_jax.data.sources import DATA_SOURCES
    from adloco_jax.models.architectures import ARCHITECTURES

    return {
        "AGGREGATORS": contrib.AGGREGATORS,
        "ARCHITECTURES": ARCHITECTURES,
        "BATCH_TESTS": BATCH_TESTS,
        "DATA_SOURCES": DATA_SOURCES,
        "INNER_OPTIMIZERS": contrib.INNER_OPTIMIZERS,
        "MERGE_POLICIES": MERGE_POLICIES,
        "OUTER_OPTIMIZERS": contrib.OUTER_OPTIMIZERS,
        "ROUND_LENGTHS": contrib.ROUND_LENGTHS,
    }


def completed(
    config: Config,
    workdir: str | Path | None = None,
    *,
    reads: bool = True,
    note: Callable[[str], None] = lambda line: None,
) -> Settings:
    """Find what a config leaves unset: in a run's record, or else where other settings say.

    Sizes of the model are those of `model.init_from`, whose `config.json` is kept too;
    `data.source` and `data.text_column` follow from the files; limits of batches from the first
    batch; workers from the learners. Chats get a date, which their templates write.

    Args:
      config: The result of `validate`. Settings, which are complete, are returned as they are.
      workdir: The run's folder, whose record precedes all else.
      reads: Whether files, the hub and the clock may be read. If not, only workers and limits of
        batches are found.
      note: Called with a line that says what was found in files.

    Raises:
      ConfigError: If the result breaks a rule, with a line for each; or if the files of a text are
        of several kinds or no text, or the hub has no such checkpoint.
      DataError: If the text or the checkpoint is missing or damaged.
      ResourceError: If the hub does not answer.
    """
    if isinstance(config, Settings):
        return config
    known = tables()
    record = _record(workdir)
    # In each group, what is unset is first taken from the record, then found by other settings.
    batching = _with_recorded(config.batching, record)
    batching = _with_limits(batching, known["BATCH_TESTS"])
    ensemble = _with_recorded(config.ensemble, record)
    ensemble = _with_workers(ensemble, config.engine)
    model, data = config.model, config.data
    if reads:
        # What was recorded of a model counts only if the run had the same checkpoint; what was
        # recorded of a text only if both runs read one from a path, or neither does.
        same_checkpoint = record.get("model", {}).get("init_from") == model.init_from
        of_checkpoint = record if same_checkpoint else {}
        model, found_sizes = _with_checkpoint(model, of_checkpoint, known["ARCHITECTURES"])
        both_have_text = bool(record.get("data", {}).get("path")) == bool(data.path)
        of_text = record if both_have_text else {}
        data, found = _with_text_found(data, of_text)
        if found or found_sizes:
            found_all = ", ".join(found + found_sizes)
            note(f"found: {found_all}; set a key to choose another value")

    groups = dict(config)
    groups.update(model=model, data=data, ensemble=ensemble, batching=batching)
    # `model_construct` checks nothing: `validate` has checked types and limits, and what is left
    # are the rules.
    settings = Settings.model_construct(config.model_fields_set, **groups)
    faults = settings.faults(known)
    if faults:
        raise ConfigError("\n".join(faults))
    return settings


def _record(workdir: str | Path | None) -> dict[str, Any]:
    """Return the settings that a run recorded, by group; empty without a run.

    `workdir` is the run's folder, or None. Empty also if the record is damaged: a run reads it
    again later, and then raises an error.
    """
    if workdir is not None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return dict(json.loads(Path(workdir, "config.json").read_bytes())["config"])
    return {}


def _with_recorded(group: Any, record: dict[str, Any]) -> Any:
    """Return a `SettingsGroup` with the recorded values of what it leaves unset.

    `record` has the recorded options of all groups, by group. What it lacks stays unset.
    """
    recorded = record.get(group.group, {})  # `group.group` is the name of the group
    found = {key: recorded[key] for key in group.unset if key in recorded}
    return group.model_copy(update=found)


def _with_checkpoint(
    model: ModelSettings, record: dict[str, Any], architectures: Mapping[str, Any]
) -> tuple[ModelSettings, list[str]]:
    """Add the `config.json` of `model.init_from`, and find the sizes that are unset.

    Returns the settings of the model, and a line if sizes were read in the checkpoint. `record` has
    all settings of an earlier run from the same checkpoint, and is empty without one;
    `architectures` is the table of that name.

    Raises ConfigError if there is no such checkpoint, DataError if it is damaged, ResourceError if
    the hub does not answer.
    """
    model = _with_recorded(model, record)
    recorded = record.get("model", {})
    if model.base_dtype is None:
        # A run that goes on keeps the type that was found to fit, and a `remat` found with it.
        remat = model.remat
        if remat is None:
            remat = recorded.get("remat")
        update = {"base_dtype": recorded.get("base_dtype"), "remat": remat}
        model = model.model_copy(update=update)
    weight_map = architectures[model.arch].weight_map  # None: checkpoints are not read
    if not model.init_from or weight_map is None:
        return model, []
    found: list[str] = []
    content = recorded.get("checkpoint") or model.checkpoint  # config.json as text
    if not content or model.unset:
        from adloco_jax.models import hf  # imported only here, because it imports JAX

        checkpoint = hf.inspect(model.init_from)
        content = json.dumps(checkpoint.config)
        # A checkpoint of another architecture may lack some sizes. The default is used for these,
        # and the run later refuses such a checkpoint.
        attributes = {attribute for attribute, _ in weight_map.sizes.values()}  # such as "width"
        sizes = {}
        for name in model.unset & attributes:
            sizes[name] = getattr(checkpoint.network, name, getattr(model, name))
        model = model.model_copy(update=sizes)
        if sizes:
            found = [f"sizes of {model.init_from}"]
    # Options that are still unset keep their values, and count as set from now on: pydantic counts
    # an option that was given a value.
    values = {name: getattr(model, name) for name in model.unset}
    return model.model_copy(update=values | {"checkpoint": content}), found


def _with_text_found(data: DataSettings, record: dict[str, Any]) -> tuple[DataSettings, list[str]]:
    """Find source and column of a text by its files, and today's date for chats.

    Returns the settings of the data, and what was found in files, as "key=value by ...". `record`
    has all settings that the run recorded before, and is empty if it recorded none about a text.

    Raises ConfigError if the files are of several kinds or no text, DataError if they are missing
    or damaged.
    """
    data = _with_recorded(data, record)
    found = []
    if "source" in data.unset:
        from adloco_jax.data.corpus import source_of  # imported only here, because it is slow

        data = data.model_copy(update={"source": source_of(data.path)})
        found.append(f"data.source={data.source} by the files of {data.path}")
    if "text_column" in data.unset:
        from adloco_jax.data.corpus import column_of_texts

        data = data.model_copy(update={"text_column": column_of_texts(data)})
        if data.text_column != OPTIONS["data.text_column"].default:
            found.append(f"data.text_column={data.text_column} by the files of {data.path}")
    if data.is_chat:
        today = datetime.date.today().isoformat()
        # A run that goes on keeps its date, so that its chats stay as they were.
        date = record.get("data", {}).get("date") or data.date or today
        data = data.model_copy(update={"date": date})
    return data, found


def _with_workers(ensemble: EnsembleSettings, engine: EngineSettings) -> EnsembleSettings:
    """Return the settings of trainers and workers, with the number of workers set.

    If it is unset, there is a worker for each learner, or without learners the default number.
    """
    workers = ensemble.num_workers
    if "num_workers" in ensemble.unset and engine.kind != "local":
        # At least as many as trainers, because each needs a worker.
        workers = max(engine.max_learners or _FEWEST_LEARNERS, ensemble.num_trainers)
    return ensemble.model_copy(update={"num_workers": workers})


def _with_limits(batching: BatchingSettings, tests: Mapping[str, Any]) -> BatchingSettings:
    """Return the settings of batches, with limits that follow the first batch where unset.

    Sets `batch_cap`, which limits a worker's batch; `max_batch_size`, which limits a micro-batch,
    of which a batch may have several (None if memory decides); and `buckets`, the sizes of
    micro-batches, for each of which programs are compiled. `tests` is the table of batch-size
    tests. A test may ask for more workers, longer rounds or a larger batch; `batching.growth` lists
    those of the three that may grow.
    """
    first = batching.initial_batch_size
    is_measured = tests[batching.test].needs != "nothing"  # else a schedule sets the batch
    grows = batching.test != "constant" and ("batch" in batching.growth or not is_measured)

    cap = batching.batch_cap  # its default if it is unset
    if "batch_cap" in batching.unset and grows:
        cap = max(cap, first)
    elif "batch_cap" in batching.unset:
        cap = first
    largest = batching.max_batch_size  # None: what fits in memory is found later
    if largest is None and (not grows or cap == first):  # batches stay as the first
        largest = first

    most = cap  # sequences of a micro-batch
    if largest is not None:
        most = largest
    if batching.buckets:
        sizes = [*batching.buckets]
    # 1, 2, 3, 4, 6, 8, 12, ...: powers of two, and one and a half times each. So few programs are
    # compiled, and rounding a batch up to one of these adds less than half to it.
    elif grows:
        powers = [2**n for n in range(most.bit_length())]
        between = [3 * power // 2 for power in powers[1:]]
        sizes = [*powers, *between, most]
    else:
        sizes = [first]
    sizes = [size for size in sizes if size <= most]
    # The largest micro-batch, if it is set, is one of them. The list is never empty.
    buckets = tuple(sorted({*sizes, largest or max(sizes, default=most)}))
    limits = {"max_batch_size": largest, "batch_cap": cap, "buckets": buckets}
    return batching.model_copy(update=limits)


def worded(error: ValidationError) -> list[str]:
    """Describe the faults that pydantic has found in settings, each on one line.

    A line has the key, the value and what it must be; of an unknown key, the nearest known ones.
    """
    lines = []
    for fault in error.errors(include_url=False):
        key = ""  # such as batching.ramp[0][1]
        for part in fault["loc"]:
            key += f"[{part}]" if isinstance(part, int) else f".{part}"
        key = key.removeprefix(".")
        if fault["type"] == "extra_forbidden":
            lines.append(unknown_key_fault(key))
        else:
            need = re.sub(r"^\w+ should", "must", fault["msg"])  # such as "Input should be ..."
            lines.append(f"{key} = {shown(fault['input'])}: {need}")
    return lines


def unknown_key_fault(key: str) -> str:
    """Return one line: a key is unknown, and which known keys are nearest in name."""
    nearest = namesakes(key)
    if not nearest:  # the known key with the most similar letters
        nearest = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.0)
    return f"{key}: no such key; did you mean {' or '.join(nearest)}?"


def namesakes(key: str) -> list[str]:
    """List the known keys that an unknown one may mean, by its last part, its name.

    They are those with the same name, or with words of which it has the initials (`lr` for
    `learning_rate`). Else those that contain it as words (`batch_size`), or the first two of the
    group that it names. Of several, keys of the same group are preferred. The list may be empty.
    """
    group, _, name = key.rpartition(".")
    groups = {}
    names = {}
    for known in OPTIONS:
        groups[known], _, names[known] = known.rpartition(".")

    found = []
    for known in OPTIONS:
        words = names[known].split("_")
        initials = ""  # one word has none: a single letter may mean too many keys
        if len(words) > 1:
            initials = "".join(word[0] for word in words)
        if name in (names[known], initials):
            found.append(known)
    if not found:
        found = [known for known in OPTIONS if f"_{name}_" in f"_{names[known]}_"]
    if not found:
        found = [known for known in OPTIONS if groups[known] == name][:2]
    return [known for known in found if groups[known] == group] or found
