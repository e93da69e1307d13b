"""Check the inputs of a run, and the arguments of `fit`, before anything is compiled or created."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from adloco_jax.contrib import ROUND_LENGTHS
from adloco_jax.core.arguments import takes
from adloco_jax.core.types import GradientStats, LossFn, trainable, without_keys
from adloco_jax.data import ArrayRows, check_corpus
from adloco_jax.engine.inputs import Rows
from adloco_jax.engine.optimizers import Labeller, inner_transform, labeller, parameter_labels
from adloco_jax.errors import ConfigError, own_code
from adloco_jax.loop.adloco import choose_members, start
from adloco_jax.loop.growth import with_batch_sizes
from adloco_jax.loop.plans import round_plans
from adloco_jax.models import hf
from adloco_jax.models.configured import InitFn
from adloco_jax.run.assemble import Run
from adloco_jax.run.checkpoint import list_rounds, shapes
from adloco_jax.run.choose import Mode
from adloco_jax.run.folder import check_config
from adloco_jax.run.program import Model
from adloco_jax.run.weights import require_same_network
from adloco_jax.settings import OPTIONS, InnerSettings, OuterSettings, Settings

_OF_ROWS = ("heldout_rows", "fingerprint", "shards", "tokens_per_byte", "batch")


def check_inputs(
    settings: Settings,
    workdir: Path | None = None,
    *,
    accept_config_change: bool = False,
) -> list[str]:
    """Make the checks that need no text or weights; return a line for each that had to be left.

    Raises ConfigError for contradictory settings, DataError for a path that leads nowhere,
    CheckpointError if a run's `config.json` in `workdir` cannot be read.
    """
    model, unchecked = settings.model, []
    rounds = []
    if workdir is not None:
        check_config(workdir, settings, accept=accept_config_change)
        rounds = list_rounds(workdir / "checkpoints")
    if rounds:
        unchecked.append(f"{workdir}: whether its checkpoints are whole, and the data its own")
    elif model.init_from:
        found = hf.inspect(model.init_from)
        require_same_network(model, settings.adapter, found)
        which = "whether all its numbers are finite" if found.has_tensors else "its weights"
        unchecked.append(f"model.init_from = {model.init_from}: {which}")
    unchecked += check_corpus(settings.data, model, workdir)
    return unchecked


def check_rules(run: Run) -> None:
    """Call each rule that an entry of a table names, once; raise ConfigError for its errors."""
    settings = run.settings
    control = start(settings, settings.batching.max_batch_size or 1)
    with own_code(f"inner.round_length = {settings.inner.round_length}"):
        round_plans(control, settings)
    measured = dict.fromkeys(GradientStats.__dataclass_fields__, np.full(1, 7.0))
    stats = {m: GradientStats(**measured) for m in control.trainers}
    with own_code(f"batching.test = {settings.batching.test}"):
        with_batch_sizes(control, stats, settings, control.trainers)
    with own_code(f"merge.policy = {settings.merge.policy}"):
        choose_members(control, dict.fromkeys(control.trainers, 1.0), settings.merge)
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trainable(run.spec.params)
    )
    two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), one)
    name = f"outer.aggregator = {settings.outer.aggregator}"
    with own_code(name):
        made = jax.eval_shape(run.spec.aggregate, two, jax.ShapeDtypeStruct((2,), jnp.float32))
        if shapes(made) != shapes(one):
            raise ConfigError(f"{name}: its result differs in shape from the parameters")


class FitArguments(NamedTuple):
    """What the caller of `fit` or `join` gives beside settings; `fit` describes each."""

    corpus: Rows
    loss_fn: LossFn
    init_fn: InitFn | None = None
    params: PyTree | None = None
    num_classes: int | None = None
    inner_tx: optax.GradientTransformation | None = None
    outer_tx: optax.GradientTransformation | None = None
    loss_of: Callable[[Mode], LossFn] | None = None
    eval_loss_fn: LossFn | None = None
    label_params: Labeller | None = None

    def parts(self, settings: Settings) -> dict[str, Any]:
        """Return what is given as arguments of `assemble`."""
        corpus = self.corpus
        if isinstance(corpus, ArrayRows):
            corpus = corpus.ordered(settings, num_classes=self.num_classes)
        model = Model(
            init_fn=self.init_fn or (lambda key: self.params),
            loss_of=lambda mode, _: self.loss_of(mode) if self.loss_of else self.loss_fn,
            row_length=corpus.heldout_rows.shape[1],
            num_classes=self.num_classes,
            params=self.params,
            can_remat=self.loss_of is not None,
            label_params=self.label_params,
            eval_loss_fn=self.eval_loss_fn,
        )
        txs = {"inner_tx": self.inner_tx, "outer_tx": self.outer_tx}
        return {"model": model, "corpus": corpus, **txs}


def check_arguments(settings: Settings, given: FitArguments) -> Settings:
    """Check the arguments of `fit`; return its settings, with rate 1 for optimizers that are given.

    ConfigError has one line for each fault, with its argument.
    """
    corpus, init_fn, params = given.corpus, given.init_fn, given.params
    faults = []
    if not isinstance(settings, Settings):
        faults.append(f"settings: {_kind(settings)}; give a config, or validate(config)")
    elif settings.data.row_parts > 1:
        faults.append("data.attention, text_column: loss_fn says what tokens attend to; unset both")
    elif settings.adapter.rank:
        rank = settings.adapter.rank
        faults.append(f"adapter.rank = {rank}: loss_fn decides what is trained; set 0")
    rows: Any = getattr(corpus, "heldout_rows", None)
    if hasattr(corpus, "__len__") and not hasattr(corpus, "batch"):
        faults.append(f"corpus: {_kind(corpus)}; give ArrayRows(corpus, sequence_length=L)")
    elif lacks := [name for name in _OF_ROWS if not hasattr(corpus, name)]:
        faults.append(
            f"corpus: {_kind(corpus)} without {', '.join(lacks)};"
            " adloco_jax.engine.inputs.Rows says what rows need"
        )
    elif np.ndim(rows) != 2 or not np.issubdtype(getattr(rows, "dtype", object), np.integer):
        shape, dtype = np.shape(rows), getattr(rows, "dtype", type(rows).__name__)
        faults.append(
            f"corpus.heldout_rows: {dtype} of shape {shape}; give an array of integers [E, L + 1]"
        )
    make = init_fn or (lambda key: params)
    faults = faults or _of_params(make, params, "init_fn" if init_fn else "params")
    if not faults:
        drawn = jax.eval_shape(make, jax.random.key(0))
        model = given.parts(settings)["model"]
        labels = labeller(settings.model.arch, given.label_params)
        parameter_labels(drawn, labels, inner=settings.inner, outer=settings.outer)
        for name in ("inner_tx", "outer_tx"):
            if (tx := getattr(given, name)) is not None:
                group = name.removesuffix("_tx")
                options = getattr(settings, group)
                faults += _beside(name, options) + _of_transform(name, tx, drawn)
                options = options.model_copy(update={"learning_rate": 1.0})
                settings = settings.model_copy(update={group: options})
        # The config may name an optimizer that the user has added to the table.
        if given.inner_tx is None:
            tx = inner_transform(settings.inner, labels)
            faults += _of_transform("inner_tx", tx, drawn)
        rows_BL = jax.ShapeDtypeStruct((2, model.row_length), np.int32)
        with own_code("loss_of"):
            loss_fn = model.loss_of(Mode(sequential=True, remat=False), "xla")
        faults += _of_loss("loss_fn", loss_fn, drawn, rows_BL)
        if given.eval_loss_fn is not None:
            faults += _of_loss("eval_loss_fn", given.eval_loss_fn, drawn, rows_BL)
    if faults:
        raise ConfigError("\n".join(faults))
    # A text that the settings name is not read.
    data = settings.data.model_copy(update={"path": "", "heldout_path": ""})
    return settings.model_copy(update={"data": data})


# The options that describe an optimizer, which do not act on one that the caller gives.
_OF_OPTIMIZERS = {
    "inner_tx": "tx learning_rate warmup_updates schedule final_lr_frac weight_decay decay"
    " beta1 beta2 round_length",
    "outer_tx": "tx learning_rate momentum",
}


def _beside(name: str, settings: InnerSettings | OuterSettings) -> list[str]:
    faults, group = [], name.removesuffix("_tx")
    for option in _OF_OPTIMIZERS[name].split():
        key, value = f"{group}.{option}", getattr(settings, option)
        by_rate = option != "round_length" or takes(ROUND_LENGTHS[value], "next_rate")
        if by_rate and value != (default := OPTIONS[key].default):
            faults.append(f"{name}: given beside {key}={value!r}; leave {key} at {default!r}")
    return faults


def _of_loss(
    name: str, loss_fn: LossFn, params: PyTree, rows_BL: jax.ShapeDtypeStruct
) -> list[str]:
    takes_key = name == "loss_fn" and takes(loss_fn, "key")
    with own_code(name):
        key = {"key": jax.random.key(0)} if takes_key else {}
        made = jax.eval_shape(functools.partial(loss_fn, **key), params, rows_BL)
    if getattr(made, "shape", None) == () and jnp.issubdtype(made.dtype, jnp.floating):
        return []
    shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", made)
    return [
        f"{name}: returned {str(shapes)[:200]}; return one number, the mean loss over the rows:"
        " jnp.mean of the losses, and nothing beside it (outer_step takes auxiliary outputs)"
    ]


def _of_params(init_fn: Callable[..., PyTree], params: PyTree | None, name: str) -> list[str]:
    try:
        with own_code(name):
            drawn = jax.eval_shape(init_fn, jax.random.key(0))
    except ConfigError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        # A leaf that is not an array, or a mistake in the function.
        return [f"{error}; its leaves must all be arrays: leave others out of the tree"]
    if not jax.tree.leaves(drawn):
        return [f"{name}: its parameters hold no array; expected at least one"]
    try:
        trainable(without_keys(drawn))
    except ValueError as error:
        return [f"{name}: {error}"]
    faults = _unsaved(f"{name}: params", drawn)
    # A leaf is named by its keys, which the export joins by "/" and Orbax by ".".
    for separator in "/.":
        paths = (path for path, _ in jax.tree.leaves_with_path(drawn))
        names = Counter(jax.tree_util.keystr(p, simple=True, separator=separator) for p in paths)
        faults += [
            f"{name}: {count} leaves are saved as {leaf!r}; rename all but one"
            for leaf, count in names.items()
            if count > 1
        ]
    if params is None or faults:
        return faults
    given = jax.eval_shape(lambda tree: jax.tree.map(jnp.asarray, tree), params)
    expected, found = shapes(drawn), shapes(given)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return [
                f"params: {name or 'the array'} is {found.get(name, 'missing')}, init_fn gives"
                f" {expected.get(name, 'none')}; give what init_fn would make"
            ]
    if jax.tree.structure(drawn) != jax.tree.structure(params):
        return ["params: of another structure than init_fn's; give what init_fn would make"]
    return []


def _unsaved(name: str, tree: PyTree) -> list[str]:
    """Return a line for each array of an argument that cannot be stored in a checkpoint."""
    faults = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        where = f"{name}{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key):
            faults.append(f"{where}: a PRNG key, which cannot be trained or saved; leave it out")
        elif not math.prod(jnp.shape(leaf)):
            faults.append(f"{where}: a leaf of size zero, which cannot be saved; leave it out")
    return faults


def _of_transform(name: str, tx: optax.GradientTransformation, params: PyTree) -> list[str]:
    if not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
        return [f"{name}: {_kind(tx)}; give a transformation, such as optax.adamw(1e-3)"]
    try:
        with own_code(name):
            before = jax.eval_shape(tx.init, params)
            if faults := _unsaved(f"{name}: its state", before):
                return faults
            update = optax.with_extra_args_support(tx).update
            _, after = jax.eval_shape(update, params, before, params)
    except ConfigError as error:
        return [
            f"{error}; a round passes only gradients, state and parameters to a transformation: use"
            " one that needs no other arguments"
        ]
    is_same = jax.tree.structure(before) == jax.tree.structure(after)
    if is_same and shapes(before) == shapes(after):
        return []
    return [f"{name}: an update changes the structure of its state"]


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
