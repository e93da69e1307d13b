"""Check the inputs of a run, and the arguments of `fit`, before anything is compiled or created.

The user's own code runs within `own_code`, which turns its errors into a ConfigError. To trace a
function is to run it on shapes alone (`jax.eval_shape`), without computing anything. A table maps
names to what an option can name, such as aggregators; users can add entries.

A trainer is a model in training; its workers train copies of it, and an aggregator makes one update
of their differences. A mode says how programs spare memory. An adapter is small matrices that are
trained beside frozen weights.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.arguments import takes
from adloco_jax.core.types import GradientStats, LossFn, trainable, without_state
from adloco_jax.engine.inputs import Rows
from adloco_jax.engine.memory import Mode
from adloco_jax.engine.model import Model
from adloco_jax.engine.optimizers import (
    Labeller,
    inner_transform,
    labeller,
    parameter_labels,
)
from adloco_jax.engine.spec import Kernel
from adloco_jax.errors import ConfigError, own_code
from adloco_jax.loop.adloco import choose_members, start
from adloco_jax.loop.growth import with_batch_sizes
from adloco_jax.loop.plans import round_plans
from adloco_jax.models import hf
from adloco_jax.models.configured import InitFn, build_network
from adloco_jax.run.before.assemble import Run
from adloco_jax.run.kept.checkpoint import list_rounds, shapes
from adloco_jax.run.kept.folder import check_config
from adloco_jax.settings import OPTIONS, InnerSettings, OuterSettings, Settings

# What an object must have to be the rows of a caller of `fit`: the members of the protocol `Rows`.
_ROWS_MEMBERS = ("heldout_rows", "fingerprint", "shards", "tokens_per_byte", "batch")


def check_inputs(
    settings: Settings,
    workdir: Path | None = None,
    *,
    accept_config_change: bool = False,
) -> list[str]:
    """Check folder and checkpoint; return a line for each check that only the run can make.

    `workdir` is the run's folder; None: it has none yet. Nothing is compiled.

    Raises ConfigError for a folder or a checkpoint that does not fit the settings, DataError if a
    checkpoint is missing or damaged, ResourceError if the hub does not answer, CheckpointError if a
    run's `config.json` in `workdir` cannot be read.
    """
    model = settings.model
    unchecked = []
    rounds = []
    if workdir is not None:
        check_config(workdir, settings, accept=accept_config_change)
        rounds = list_rounds(workdir / "checkpoints")
    if rounds:
        unchecked.append(f"{workdir}: whether its checkpoints are whole, and the data its own")
    elif model.init_from:
        found = hf.inspect(model.init_from)  # what the checkpoint describes, without its weights
        hf.require_same_network(build_network(model, settings.adapter), found, model)
        left = "its weights"
        if found.stored_as:  # not empty for local files, whose names and shapes were compared
            left = "whether all its numbers are finite"
        unchecked.append(f"model.init_from = {model.init_from}: {left}")
    return unchecked


def check_rules(run: Run) -> None:
    """Call each rule that the settings name in a public table, once, with made-up values.

    The rules are that of round lengths, the batch-size test, the merge policy and the aggregator. A
    rule may be the user's own. Raises ConfigError for its error, or an aggregate of a wrong shape.
    """
    settings = run.settings
    # The host's data before the first round. A largest micro-batch that is not known counts as 1.
    # What the rules return for it is not used: only their errors matter.
    control = start(settings.ensemble, settings.batching, settings.batching.max_batch_size or 1)

    with own_code(f"inner.round_length = {settings.inner.round_length}"):
        round_plans(control, settings)

    any_number = np.full(1, 7.0)  # each statistic of a trainer with one worker
    measured = {field.name: any_number for field in dataclasses.fields(GradientStats)}
    stats = {trainer: GradientStats(**measured) for trainer in control.trainers}
    with own_code(f"batching.test = {settings.batching.test}"):
        with_batch_sizes(control, stats, settings, control.trainers)

    with own_code(f"merge.policy = {settings.merge.policy}"):
        losses = dict.fromkeys(control.trainers, 1.0)
        choose_members(control, losses, settings.merge)

    # An aggregator makes one tree of the differences of, here, two workers and their weights. A
    # difference has float32 in place of each trained array.
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trainable(run.spec.params)
    )
    two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), one)
    weights = jax.ShapeDtypeStruct((2,), jnp.float32)
    name = f"outer.aggregator = {settings.outer.aggregator}"
    with own_code(name):
        made = jax.eval_shape(run.spec.aggregate, two, weights)
        if shapes(made) != shapes(one):
            raise ConfigError(f"{name}: its result differs in shape from the parameters")


def own_model(
    loss_fn: LossFn,
    *,
    loss_of: Callable[[Mode], LossFn] | None = None,
    init_fn: InitFn | None = None,
    params: PyTree | None = None,
    num_classes: int | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
    eval_loss_fn: LossFn | None = None,
    label_params: Labeller | None = None,
) -> Model:
    """Describe the model of the caller of `fit` or `join`.

    Args:
      loss_fn: The mean loss of parameters over rows.
      loss_of: Makes the loss for a mode, which says how memory is spared. None: `loss_fn` in all.
      init_fn: Makes the parameters from a random key. Not used with `params`.
      params: The parameters to begin with.
      num_classes: Number of classes of labelled rows; None: rows have no labels.
      inner_tx: Optimizer of the workers; None: the configured one.
      outer_tx: Optimizer of the trainers; None: the configured one.
      eval_loss_fn: The loss on held-out rows; None: `loss_fn`.
      label_params: Labels each parameter for optimizers that treat kinds of them unlike; None: by
        the architecture, or by names.
    """

    def loss_in_mode(mode: Mode, kernel: Kernel) -> LossFn:
        """Return the loss for a mode; how the caller's model computes attention is its affair."""
        return loss_fn if loss_of is None else loss_of(mode)

    def given_params(key: Array) -> PyTree:
        """Return the caller's parameters; None if there are none, which `check_own` refuses."""
        return params

    if params is not None or init_fn is None:
        init_fn = given_params
    return Model(
        init_fn=init_fn,
        loss_of=loss_in_mode,
        num_classes=num_classes,
        params=params,
        can_remat=loss_of is not None,
        label_params=label_params,
        eval_loss_fn=eval_loss_fn,
        inner_tx=inner_tx,
        outer_tx=outer_tx,
    )


def check_own(settings: Settings, model: Model, corpus: Rows) -> Settings:
    """Check the model and rows of the caller of `fit`; return its settings for them.

    These have rate 1 for optimizers that are given, and name no text. `model` is from `own_model`.
    The caller's functions are traced, not run. Raises ConfigError, which names the argument, if one
    cannot be used, or an option is set that it replaces.
    """
    # What the settings may not decide.
    heldout_rows = _checked_heldout_rows(corpus)
    if settings.data.separates_documents:
        raise ConfigError(
            "data.attention, text_column: loss_fn says what tokens attend to; unset both"
        )
    rank = settings.adapter.rank
    if rank > 0:
        raise ConfigError(f"adapter.rank = {rank}: loss_fn decides what is trained; set 0")

    # Parameters, their labels, and optimizers.
    given = "params"  # the argument from which the parameters are
    if model.params is None:
        given = "init_fn"
    params = _checked_params(given, model.init_fn)
    labels = labeller(settings.model.arch, model.label_params)
    # Raises ConfigError for a parameter whose label is needed and not known.
    parameter_labels(params, labels, inner=settings.inner, outer=settings.outer)
    inner_tx = model.inner_tx
    if inner_tx is None:  # the config may name an optimizer that the user has added to the table
        inner_tx = inner_transform(settings.inner, labels)
    _check_transform("inner_tx", inner_tx, params)
    if model.outer_tx is not None:
        _check_transform("outer_tx", model.outer_tx, params)

    # The settings: without a text, and without what describes an optimizer that is given.
    data = settings.data.model_copy(update={"path": "", "heldout_path": ""})
    inner = settings.inner
    outer = settings.outer
    faults: list[str] = []
    # An optimizer that is given has its own rate. What it returns is multiplied by the option's.
    if model.inner_tx is not None:
        faults += _options_beside("inner", inner)
        inner = inner.model_copy(update={"learning_rate": 1.0})
    if model.outer_tx is not None:
        faults += _options_beside("outer", outer)
        outer = outer.model_copy(update={"learning_rate": 1.0})
    if faults:
        raise ConfigError("\n".join(faults))

    # The losses, on two rows.
    rows_BL = jax.ShapeDtypeStruct((2, heldout_rows.shape[1]), np.int32)
    with own_code("loss_of"):
        # Any mode and kernel do: the loss must be one number in all.
        loss_fn = model.loss_of(Mode(sequential=True, remat=False), "xla")
    if takes(loss_fn, "key"):  # training gives a random key to a loss with this parameter
        loss_fn = functools.partial(loss_fn, key=jax.random.key(0))
    _check_loss("loss_fn", loss_fn, params, rows_BL)
    if model.eval_loss_fn is not None:
        _check_loss("eval_loss_fn", model.eval_loss_fn, params, rows_BL)
    return settings.model_copy(update={"data": data, "inner": inner, "outer": outer})


def _checked_heldout_rows(corpus: Any) -> np.ndarray:
    """Return the held-out rows of an object.

    Raises ConfigError if the object lacks a member of `Rows`, or its held-out rows are no array of
    ids [E, L + 1].
    """
    lacks = [name for name in _ROWS_MEMBERS if not hasattr(corpus, name)]
    if lacks:
        raise ConfigError(
            f"corpus: {_type_in_words(corpus)} without {', '.join(lacks)}; give ArrayRows, or an"
            " object with the methods of adloco_jax.engine.inputs.Rows"
        )
    rows = corpus.heldout_rows
    dtype = getattr(rows, "dtype", object)  # a list has none
    if np.ndim(rows) != 2 or not np.issubdtype(dtype, np.integer):
        found = f"{getattr(rows, 'dtype', type(rows).__name__)} of shape {np.shape(rows)}"
        need = "give an array of integers [E, L + 1]"
        raise ConfigError(f"corpus.heldout_rows: {found}; {need}")
    return rows


# The options that describe an optimizer, which do not act on one that the caller gives.
_OPTIMIZER_OPTIONS = {
    "inner": "tx learning_rate warmup_updates schedule final_lr_frac weight_decay decay beta1"
    " beta2",
    "outer": "tx learning_rate momentum",
}


def _options_beside(group: str, settings: InnerSettings | OuterSettings) -> list[str]:
    """Return a line for each set option that would not act beside the caller's optimizer.

    `settings` are those of `group`, "inner" or "outer".
    """
    faults = []
    for name in _OPTIMIZER_OPTIONS[group].split():
        key = f"{group}.{name}"
        value = getattr(settings, name)
        default = OPTIONS[key].default
        if value != default:
            faults.append(f"{group}_tx: given beside {key}={value!r}; leave {key} at {default!r}")
    return faults


def _check_loss(name: str, loss_fn: LossFn, params: PyTree, rows_BL: jax.ShapeDtypeStruct) -> None:
    """Raise ConfigError unless a loss is one floating-point number.

    `name` is the argument of `fit`, `params` shapes, and `rows_BL` the shape of rows [B, L + 1].
    """
    with own_code(name):
        made = jax.eval_shape(loss_fn, params, rows_BL)
    is_number = getattr(made, "shape", None) == ()  # a tuple or a dict has no shape
    if not is_number or not jnp.issubdtype(made.dtype, jnp.floating):
        found = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", made)
        raise ConfigError(
            f"{name}: returned {str(found)[:200]}; return one number, the mean loss over the rows:"
            " jnp.mean of the losses, and nothing beside it (outer_step takes auxiliary outputs)"
        )


def _checked_params(name: str, init_fn: InitFn) -> PyTree:
    """Return the shapes of a model's parameters; raise ConfigError if they cannot be saved.

    `name` is the argument of `fit` that they come from, "init_fn" or "params".
    """
    try:
        with own_code(name):
            params = jax.eval_shape(init_fn, jax.random.key(0))
            # Raise for state that is no parameter, such as batch statistics, and for parameters of
            # which none is floating-point or one is complex.
            trainable(without_state(params))
    except ConfigError as error:
        advice = ""
        if isinstance(error.__cause__, TypeError):  # as JAX raises for a leaf that is no array
            advice = "; its leaves must all be arrays: leave others out of the tree"
        raise ConfigError(f"{error}{advice}") from error
    _check_savable(f"{name}: params", params)
    # A leaf is named by its keys, which the export joins by "/" and Orbax by ".".
    for separator in "/.":
        names: Counter[str] = Counter()
        for path, _ in jax.tree.leaves_with_path(params):
            names[jax.tree_util.keystr(path, simple=True, separator=separator)] += 1
        leaf, count = names.most_common(1)[0]
        if count > 1:
            raise ConfigError(f"{name}: {count} leaves are saved as {leaf!r}; rename all but one")
    return params


def _check_savable(name: str, tree: PyTree) -> None:
    """Raise ConfigError if a tree has an array that a checkpoint cannot store.

    Those are PRNG keys and arrays of size zero.
    `name` says in the message what the tree is.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if is_key or not leaf.size:
            where = f"{name}{jax.tree_util.keystr(path)}"
            found = "a PRNG key" if is_key else "an array of size zero"
            raise ConfigError(f"{where}: {found}, which cannot be saved; leave it out")


def _check_transform(name: str, tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise ConfigError unless an optimizer updates these parameters, and its state can be saved.

    Its functions are only traced. `name` is the argument of `fit`, and `params` are shapes. The
    state can be saved if its arrays can (`_check_savable`), and an update leaves its structure,
    shapes and dtypes as they were.
    """
    if not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
        need = "give a transformation, such as optax.adamw(1e-3)"
        raise ConfigError(f"{name}: {_type_in_words(tx)}; {need}")
    with own_code(name):
        before = jax.eval_shape(tx.init, params)
    _check_savable(f"{name}: its state", before)
    with own_code(f"{name}: given gradients, state and parameters"):
        # The parameters stand for gradients, which have their shapes. The update is wrapped as in a
        # run, where optimizers that take further arguments are allowed.
        _, after = jax.eval_shape(optax.with_extra_args_support(tx).update, params, before, params)
    is_same = jax.tree.structure(before) == jax.tree.structure(after)
    if not is_same or shapes(before) != shapes(after):
        raise ConfigError(f"{name}: an update changes the structure of its state")


def _type_in_words(value: object) -> str:
    """Name the type of a value with its article, such as "an int"."""
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"
