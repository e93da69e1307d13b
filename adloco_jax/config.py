"""Make the default config of a run, check a config, and report all faults.

A config file calls `default_config()`, a locked ConfigDict of the options in `adloco_jax.settings`,
and changes some. `validate` turns it into a `Config`, and `completed` finds what that leaves unset:
the `Settings` that all other modules read.
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
    """Return a locked config in which every option has its default value."""
    config = ConfigDict({group: {} for group in GROUPS})
    for key in OPTIONS:
        group, _, name = key.rpartition(".")
        value = default_of(key)
        if value in (None, "auto"):
            # A field whose default is "auto" must accept an int too. So it may have any type.
            value = FieldReference(value, field_type=object if value else plain_type(key))
        (config[group] if group else config)[name] = value
    return config.lock()


def plain_type(key: str) -> Any:
    """Return the type of an option that is set, without its limits."""
    group, _, name = key.rpartition(".")
    kind = get_type_hints(GROUPS.get(group, Settings))[name]
    return get_args(kind)[0] if type(None) in get_args(kind) else kind


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
    given = ConfigDict(dict(config), allow_dotted_keys=True).to_dict()
    values: dict[str, Any] = {group: {} for group in GROUPS} | given
    for group, _, name in (key.partition(".") for key in FOUND):
        if isinstance(values[group], dict) and values[group].get(name, "") is None:
            del values[group][name]
    faults, wrong = [], []
    try:
        settings = Config.model_validate(values)
    except ValidationError as error:  # of types and limits, which need no tables
        faults = worded(error)
        for group, *rest in (map(str, fault["loc"]) for fault in error.errors()):
            holder, name = (values[group], rest[0]) if rest else (values, group)
            holder.pop(name, None)
            wrong.append(".".join([group, *rest[:1]]) + " = ")
        settings = Config.model_validate({group: {} for group in GROUPS} | values)
    rules = settings.faults(tables())
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
    model, data, record, known = config.model, config.data, _record(workdir), tables()
    batching = _with_limits(_filled(config.batching, record), known["BATCH_TESTS"])
    ensemble = _with_workers(_filled(config.ensemble, record), config.engine)
    if reads:
        is_same = record.get("model", {}).get("init_from") == model.init_from
        model, sizes = _of_checkpoint(model, record if is_same else {}, known["ARCHITECTURES"])
        is_same = bool(record.get("data", {}).get("path")) == bool(data.path)
        data, found = _of_files(data, record if is_same else {})
        if found or sizes:
            note(f"found: {', '.join(found + sizes)}; set a key to choose another value")
    groups = {"model": model, "data": data, "ensemble": ensemble, "batching": batching}
    values = dict(config) | groups
    settings = Settings.model_construct(config.model_fields_set, **values)
    if faults := settings.faults(known):
        raise ConfigError("\n".join(faults))
    return settings


def _record(workdir: str | Path | None) -> dict[str, Any]:
    """Return the settings that a run recorded, if any; a damaged record is reported later."""
    if workdir is not None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return dict(json.loads(Path(workdir, "config.json").read_bytes())["config"])
    return {}


def _filled(group: Any, record: dict[str, Any]) -> Any:
    """Return a group of settings with the recorded values of what it leaves unset."""
    before = record.get(group.group, {})
    return group.model_copy(update={key: before[key] for key in group.unset & before.keys()})


def _of_checkpoint(
    model: ModelSettings, record: dict[str, Any], architectures: Mapping[str, Any]
) -> tuple[ModelSettings, list[str]]:
    """Add the `config.json` of `model.init_from` and unset sizes; say which were found in it."""
    model, names = _filled(model, record), architectures[model.arch].weight_map
    content, lines = record.get("model", {}).get("checkpoint") or model.checkpoint, []
    if model.base_dtype is None:
        before = record.get("model", {}).get("base_dtype")
        model = model.model_copy(update={"base_dtype": before})
    if not model.init_from or names is None:
        return model, lines
    if not content or model.unset:
        from adloco_jax.models import hf  # imported only here, because it imports JAX

        found = hf.inspect(model.init_from)
        content = json.dumps(found.config)
        # A checkpoint of another architecture may lack some sizes. The default is used for these,
        # and the run later refuses such a checkpoint.
        sizes = {
            name: getattr(found.network, name, getattr(model, name))
            for name in model.unset & {ours for ours, _ in names.sizes.values()}
        }
        lines = [f"sizes of {model.init_from}"] * bool(sizes)
        model = model.model_copy(update=sizes)
    unset = {name: getattr(model, name) for name in model.unset}
    return model.model_copy(update=unset | {"checkpoint": content}), lines


def _of_files(data: DataSettings, record: dict[str, Any]) -> tuple[DataSettings, list[str]]:
    """Find source and column of a text by its files, and today's date; say what was found."""
    data, lines = _filled(data, record), []
    for key in ("source", "text_column"):  # the source reads the column
        if key in data.unset:
            from adloco_jax.data.corpus import column_of_texts, source_of

            value = source_of(data.path) if key == "source" else column_of_texts(data)
            data = data.model_copy(update={key: value})
            if key == "source" or value != OPTIONS[f"data.{key}"].default:
                lines.append(f"data.{key}={value} by the files of {data.path}")
    if data.is_chat:
        date = record.get("data", {}).get("date") or data.date or datetime.date.today().isoformat()
        data = data.model_copy(update={"date": date})
    return data, lines


def _with_workers(ensemble: EnsembleSettings, engine: EngineSettings) -> EnsembleSettings:
    """Let each learner have one worker, unless their number is set."""
    workers = ensemble.num_workers
    if "num_workers" in ensemble.unset and engine.kind != "local":
        workers = max(engine.max_learners or _FEWEST_LEARNERS, ensemble.num_trainers)
    return ensemble.model_copy(update={"num_workers": workers})


def _with_limits(batching: BatchingSettings, tests: Mapping[str, Any]) -> BatchingSettings:
    """Let unset limits of batches follow the first batch; list the sizes of micro-batches."""
    first, largest = batching.initial_batch_size, batching.max_batch_size
    is_measured = tests[batching.test].needs != "nothing"
    grows = batching.test != "constant" and ("batch" in batching.growth or not is_measured)
    cap = batching.batch_cap
    if batching.unset:
        cap = max(cap, first) if grows else first
    if largest is None and (not grows or cap == first):
        largest = first
    most = largest or cap
    powers = [2**n for n in range(most.bit_length())]
    sizes = [*powers, *(3 * power // 2 for power in powers[1:]), most] if grows else [first]
    sizes = [size for size in batching.buckets or sizes if size <= most]
    buckets = tuple(sorted({*sizes, largest or max(sizes, default=most)}))
    limits = {"max_batch_size": largest, "batch_cap": cap, "buckets": buckets}
    return batching.model_copy(update=limits)


def worded(error: ValidationError) -> list[str]:
    """Describe the faults that pydantic has found in settings, each on one line."""
    lines = []
    for fault in error.errors(include_url=False):
        loc = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]]
        key = "".join(loc).removeprefix(".")
        if fault["type"] == "extra_forbidden":
            lines.append(unknown_key_fault(key))
        else:
            need = re.sub(r"^\w+ should", "must", fault["msg"])
            lines.append(f"{key} = {shown(fault['input'])}: {need}")
    return lines


def unknown_key_fault(key: str) -> str:
    """Return one line: a key is unknown, and which known keys are nearest in name."""
    nearest = namesakes(key) or difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.0)
    return f"{key}: no such key; did you mean {' or '.join(nearest)}?"


def namesakes(key: str) -> list[str]:
    """List the known keys with the same last part, or whose words begin with its letters (`lr`).

    Else those that contain it as words (`batch_size`), or the first of the group that it names. Of
    several, keys of the same group are preferred.
    """
    group, _, name = key.rpartition(".")
    lasts = {known: known.rpartition(".")[2] for known in OPTIONS}
    found = [
        known
        for known, last in lasts.items()
        if name in (last, "".join(word[0] for word in last.split("_") if "_" in last))
    ]
    found = found or [known for known, last in lasts.items() if f"_{name}_" in f"_{last}_"]
    found = found or [known for known in OPTIONS if known.startswith(f"{name}.")][:2]
    return [known for known in found if known.rpartition(".")[0] == group] or found
