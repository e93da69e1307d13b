"""Write the consensus model of a run to a folder, and read a model from the folder of a run.

A trainer is a model in training. The consensus is the model that stands for all trainers: the only
one, the best, or their average. A model with an adapter has frozen weights, called its base, and
trains the adapter alone.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save_file

from adloco_jax.core.types import Ensemble
from adloco_jax.data.disk import replaced_folder
from adloco_jax.data.tokenizers import Tokenizer, tokenizer_of
from adloco_jax.engine import evaluate
from adloco_jax.engine.model import spec_of
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.sharding import ensemble_spec, fetch
from adloco_jax.engine.spec import Layout, Machine, ProgramSpec
from adloco_jax.errors import CheckpointError, ConfigError
from adloco_jax.loop.adloco import Control
from adloco_jax.models import hf
from adloco_jax.models.configured import build_network, class_count
from adloco_jax.models.layers import merge_adapter, param_shapes, split_adapter, with_adapter
from adloco_jax.run.before.assemble import assemble
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.folder import recorded, recorded_settings, refuse_fit
from adloco_jax.run.kept.restore import read_control
from adloco_jax.settings import AdapterSettings, DataSettings, ModelSettings, Settings


def save(
    params: PyTree,
    folder: Path,
    model: ModelSettings,
    adapter: AdapterSettings,
    tokenizer: Tokenizer | None,
    *,
    base_sha256: str,
    merge: bool = False,
    dtype: str | None = None,
    shard_size: str = "5GB",
) -> str:
    """Write a trained model to a folder, in Hugging Face layout.

    The `config.json` of the checkpoint with which training began is kept, but for what has changed.
    Of a model with an adapter only the adapter is written, as PEFT reads it, or with `merge` the
    whole model.

    Args:
      params: The trained parameters: those of the model, or of its adapter.
      folder: Folder to write, which is replaced.
      model: The run's settings of its model.
      adapter: The run's settings of its adapter; with a rank of 0 there is none.
      tokenizer: Is written beside the model; None if rows are no text.
      base_sha256: The run's hash of the frozen weights, with which the adapter belongs.
      merge: Add the adapter to the frozen weights.
      dtype: Of the written weights; None: that of the checkpoint with which training began.
      shard_size: Size of the largest file, such as "5GB".

    Returns:
      The dtype that was written.

    Raises:
      DataError: If the frozen weights to merge with are missing or damaged, or have another hash
        than the run recorded.
      ResourceError: If the folder cannot be written.
    """
    network: Any = build_network(model, adapter)
    if adapter.rank and not merge:
        hf.save_adapter(
            params,
            folder,
            tokenizer,
            network=network,
            base=hf.base_of(model.init_from),  # name or path of the frozen weights, and commit
            sha256=base_sha256,
            base_dtype=model.base_dtype or "",
        )
        return "float32"  # of an adapter always
    if adapter.rank:  # with `merge`
        loaded = hf.load(model.init_from)
        # Raises DataError for other weights than those with which the adapter was trained.
        hf.require_same_base(loaded, base_sha256, f"model.init_from={model.init_from}")
        # The base weights alone: what was loaded may have an adapter already.
        _, base = split_adapter(loaded.params)
        params = merge_adapter(with_adapter(base, fetch(params)), network.adapter)
        network = network.clone(adapter=None)  # whose weights now contain the adapter
    config = json.loads(model.checkpoint or "{}")  # of the checkpoint with which training began
    if dtype is None:
        stored_as = config.get("dtype", config.get("torch_dtype"))  # its new and its old name
        dtype = "bfloat16" if stored_as == "bfloat16" else "float32"
    hf.save(
        params,
        folder,
        tokenizer,
        network=network,
        dtype=dtype,
        config=config,
        shard_size=shard_size,
    )
    return dtype


def _with_ends_of_answers(data: DataSettings, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Return the tokenizer of an exported model, with all tokens at which a text or answer ends.

    A model that was trained on chats ends an answer with another token than a text, which is added
    to those that end a text. Otherwise the tokenizer is unchanged, or None without one.
    """
    if tokenizer is None or not data.is_chat:
        return tokenizer
    ends = dict.fromkeys((*tokenizer.ends, *tokenizer.turn_end))  # each once, in order
    return dataclasses.replace(tokenizer, ends=tuple(ends))


def write_consensus(
    params: PyTree,
    folder: Path,
    settings: Settings,
    tokenizer: Tokenizer | None,
    *,
    base_sha256: str = "",
) -> None:
    """Replace a folder by the consensus model; print path and layout.

    The layout is Hugging Face's if the architecture has names for it and the parameters have the
    configured shapes; a caller of `fit` may have given others. Otherwise it is the file
    `params.safetensors`, with leaves named by path, such as `decoder/0/kernel`. `tokenizer` is
    None if rows are no text. `base_sha256` is the run's hash of the frozen weights, or empty.
    Raises ResourceError if the folder cannot be written.
    """
    model = settings.model
    adapter = settings.adapter
    tokenizer = _with_ends_of_answers(settings.data, tokenizer)
    network = build_network(model, adapter)
    is_as_configured = _shapes(params) == _shapes(param_shapes(network))
    has_names = hf.weight_map(network) is not None  # for its parameters, in Hugging Face layout
    # An adapter has other shapes than the network whose weights it changes.
    if has_names and (is_as_configured or adapter.rank):
        dtype = save(params, folder, model, adapter, tokenizer, base_sha256=base_sha256)
        layout = "in Hugging Face layout"
        if adapter.rank:
            layout = "an adapter, as PEFT reads it"
        print(f"export: {folder}, {layout}, {dtype}")
        return
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves[name] = np.asarray(leaf, order="C")  # safetensors writes the memory as it lies
    with replaced_folder(folder) as partial:  # takes the place of `folder` once it is whole
        save_file(leaves, partial / "params.safetensors")
    print(f"export: {folder / 'params.safetensors'}; the model has no Hugging Face names")


def _shapes(params: PyTree) -> PyTree:
    """Return the tree with the shape of each array in its place."""
    return jax.tree.map(lambda leaf: leaf.shape, params)


class TrainedModel(NamedTuple):
    """A model from a checkpoint after `round` rounds.

    `source` is `trainer 3` (its id), or of the consensus `only`, `best` (trainer) or `average`;
    `base_sha256` the run's hash of the frozen weights, or empty.
    """

    settings: Settings
    params: PyTree
    tokenizer: Tokenizer | None
    round: int
    source: str
    base_sha256: str


def read_trained(
    workdir: str | Path, machine: Machine, *, round: int | None = None, trainer: int | None = None
) -> TrainedModel:
    """Read the model of a trainer, or the consensus of all, from a checkpoint of a run.

    The consensus of several trainers is chosen by held-out losses, so it needs the run's data.

    Args:
      workdir: Folder of the run.
      machine: The devices on which the consensus is chosen.
      round: Number of rounds after which the checkpoint was saved; None: the newest.
      trainer: A trainer's id; None: the consensus.

    Raises:
      ConfigError: If there is no such checkpoint or trainer, or `fit` made the run and its model or
        data are needed, or an entry that the user added to a table is not defined here.
      CheckpointError: If the checkpoint or the run's record is damaged, or of another format.
      DataError: If the data cannot be read.
      ResourceError: If the hub that has the data does not answer, or memory does not suffice.
    """
    workdir = Path(workdir)
    settings = recorded_settings(workdir)  # raises CheckpointError without a record
    before = recorded(workdir)
    assert before is not None, "its settings were read"
    path = _checkpoint_of(workdir, round)
    spec = spec_of(settings, machine)
    try:
        checkpoint.verify(path)
        ensemble, control = _read_ensemble(path, settings, spec)
    except (checkpoint.Damaged, ConfigError) as error:
        # Of a run of `fit`, say instead that the model is not the configured one: that is why.
        refuse_fit(workdir)
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(f"{error}; choose another round of {workdir}") from error
    trainers = [*control.trainers]  # ids, by position in the stack
    if trainer is not None and trainer not in trainers:
        have = ", ".join(map(str, trainers))
        raise ConfigError(f"{path}: no trainer {trainer}, have {have}; the others have merged")

    if trainer is not None:
        params = evaluate.trainer_params(ensemble, trainers.index(trainer))
        source = f"trainer {trainer}"
    elif len(trainers) == 1:
        params = evaluate.trainer_params(ensemble, 0)
        source = "only"
    else:
        # Measuring losses needs the code of the model, which `fit` was given.
        refuse_fit(workdir)
        run = assemble(settings, machine, workdir)
        # In the batches in which the run evaluates, which are known to fit the memory.
        heldout = dataclasses.replace(run.heldout, batch_size=control.eval_batch_size)
        with contextlib.closing(Programs(run.spec)) as programs:
            programs.set_frozen(run.model.base.params)  # frozen weights go to the devices
            # In an average each trainer weighs by its demand: the batch that it asks for.
            params, source = evaluate.consensus(ensemble, programs, heldout, control.demands)
    num_classes = class_count(settings.model)
    tokenizer = tokenizer_of(settings.data, settings.model, num_classes=num_classes, run=workdir)
    return TrainedModel(
        settings=settings,
        params=params,
        tokenizer=_with_ends_of_answers(settings.data, tokenizer),
        round=control.round,
        source=source,
        base_sha256=before.base_fingerprint,
    )


def _checkpoint_of(workdir: Path, round: int | None) -> Path:
    """Return the folder of the checkpoint of a round; None: the newest.

    Raises ConfigError if there is none.
    """
    folder = workdir / "checkpoints"
    rounds = checkpoint.list_rounds(folder)  # the newest first
    if round is None and rounds:
        return folder / str(rounds[0])
    if round in rounds:
        return folder / str(round)
    have = ", ".join(map(str, reversed(rounds))) or "none"
    which = ""
    if round is not None:
        which = f" of round {round}"
    raise ConfigError(f"{folder}: no checkpoint{which}, have {have}")


def _read_ensemble(path: Path, settings: Settings, spec: ProgramSpec) -> tuple[Ensemble, Control]:
    """Read from a checkpoint the trainers' parameters, or their averages, without other states.

    Also returns what the host knew of the trainers. Raises Damaged if the checkpoint cannot be
    read, ConfigError if its arrays are not those of the settings.

    Args:
      path: The folder of a verified checkpoint.
      settings: The run's settings; with `outer.average` there are averages.
      spec: What the run's programs share, which gives shapes and dtypes.
    """
    data = checkpoint.read_host(path).get("control")  # None, if it is missing, is refused below
    control = read_control(path, data, settings.ensemble)
    name = "params_M"
    if settings.outer.average:
        name = "average_M"
    # Shapes, dtypes and shardings of the arrays to read.
    template = getattr(ensemble_spec(spec, Layout(control.sizes)), name)
    params_M = checkpoint.read_field(path, name, template)
    # Without what only training needs: optimizer states, and the number of the round.
    ensemble = Ensemble(
        params_M=params_M,
        outer_state_M=(),
        inner_state_R=(),
        sizes=control.sizes,
        round=jnp.int32(0),
    )
    return ensemble, control
