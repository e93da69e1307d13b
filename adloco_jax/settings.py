"""Every knob of a run: declared once with its type, range, default, meaning and resume rule.

A config file returns a ConfigDict of these knobs. `config.validate` turns it into `Settings`, from
which the training loop and its engine read every setting. A new knob is one declaration in its
group. This module does not import JAX: a knob has the name of its table, and the table is read
when a config is validated.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args

Change = Literal["harmless", "accepted", "refused"]

# The annotation of a type contains the allowed interval. Counts are int32 on a device.
Count: TypeAlias = Annotated[int, "[1, 2147483647]"]
Number: TypeAlias = Annotated[int, "[0, 2147483647]"]
Several: TypeAlias = Annotated[int, "[2, 2147483647]"]
Rate: TypeAlias = Annotated[float, "(0, 100]"]
Decay: TypeAlias = Annotated[float, "[0, 1)"]
Part: TypeAlias = Annotated[float, "(0, 1)"]
PartOrAll: TypeAlias = Annotated[float, "(0, 1]"]
Weight: TypeAlias = Annotated[float, "[0, 100]"]
Amount: TypeAlias = Annotated[float, "[0, 1e9]"]
Positive: TypeAlias = Annotated[float, "(0, 1e9]"]
Name: TypeAlias = Annotated[str, "not empty"]


@dataclasses.dataclass(frozen=True)
class Knob:
    """The declaration of a knob, which is one setting of a run.

    Attributes:
      default: The value of the knob in `default_config()`. For an optional knob it is the way to
        write that the knob is unset.
      doc: The meaning of the knob, with unit and source.
      table: Empty, or the name of a public table, such as "BATCH_TESTS", followed by the table's
        shipped entries. The value of the knob is then the name of an entry.
      resume: Whether the knob may change when a run is resumed: "harmless" (yes), "accepted" (with
        the flag --accept-config-change) or "refused". If it is empty in a declaration, the rule of
        the knob's group applies.
      size: For a knob that is a size of the model: the value if neither the config nor a checkpoint
        sets it.
      type: The annotation of the knob.
    """

    default: Any
    doc: str
    table: tuple[str, ...] = ()
    resume: Change | Literal[""] = ""
    size: Any = None
    type: Any = None

    @property
    def is_optional(self) -> bool:
        """Whether the knob may be unset; in `Settings` it is then None, or a size of the model."""
        return NoneType in get_args(self.type) or self.size is not None

    @property
    def kind(self) -> Any:
        """The type of the knob's value if the knob is set."""
        return get_args(self.type)[0] if NoneType in get_args(self.type) else self.type

    def entries(self) -> Mapping[str, Any]:
        """The present entries of the knob's table, including those that a config file has added."""
        return getattr(importlib.import_module("adloco_jax"), self.table[0])


def _knob(default: object, doc: str, **more: Any) -> Any:
    return dataclasses.field(metadata={"knob": Knob(default, doc, **more)})


# Declare knobs whose resume rule differs from their group's rule.
_free = functools.partial(_knob, resume="harmless")
_live = functools.partial(_knob, resume="accepted")
_fixed = functools.partial(_knob, resume="refused")


def _size(value: float, doc: str) -> Any:
    """Declare a knob for a size of the model; if unset, the size comes from `model.init_from`."""
    return _knob(None, f"{doc} Unset: read from the checkpoint, else {value}.", size=value)


def _group(resume: Change) -> Any:
    """Declare a group of knobs; a knob without a resume rule has the resume rule of the group."""
    return dataclasses.field(metadata={"resume": resume})


@dataclasses.dataclass(frozen=True)
class Model:
    """The model; the defaults are a Llama for bytes that a CPU trains in a minute."""

    arch: str = _knob("llama", "bert classifies texts.", table=("ARCHITECTURES", "llama", "bert"))
    vocab_size: Several = _size(257, "V, token ids; bytes need 257, of which one ends a text.")
    width: Count = _size(64, "D, numbers per token between layers.")
    num_layers: Count = _size(2, "N, transformer layers.")
    num_heads: Count = _size(4, "H, query heads.")
    num_kv_heads: Count = _size(2, "G, key/value heads, a divisor of num_heads; llama only.")
    mlp_width: Count = _size(176, "F, numbers per token inside a layer's MLP.")
    max_length: Count = _size(512, "Longest context of the model, in tokens.")
    norm_eps: Part = _size(1e-5, "Added to the variance in each normalisation.")
    rope_theta: Annotated[float, "[1, 1e9]"] = _size(1e4, "Base of rotary wavelengths; llama only.")
    num_classes: Several = _size(2, "C, classes of texts; bert only.")
    dtype: Literal["float32", "bfloat16"] = _live(
        "float32", "Type of the model's computations; parameters stay float32."
    )
    remat: bool | None = _live(
        "auto",
        "Recompute layers in the backward pass: less memory, more time. auto: only if memory"
        " requires it.",
    )
    loss_chunk: Number = _live(0, "Sequences per chunk of the cross-entropy; 0: all at once.")
    init_from: str = _knob(
        "",
        "Weights to start from: a folder in Hugging Face layout, or a hub name. Sizes that the"
        " config sets must equal the checkpoint's. A head that the checkpoint lacks is random."
        " Empty: random weights.",
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Where text comes from, and how it becomes rows of sequence_length + 1 tokens."""

    source: str = _knob(
        "stdlib",
        "Kind of text. stdlib: the standard library of the running Python. hf: a data set on the"
        " Hugging Face hub, a saved data set, or files. tokens: a folder that adloco prepare made.",
        table=("DATA_SOURCES", "stdlib", "text", "jsonl", "parquet", "hf", "tokens"),
    )
    # A path may change on resume, because the fingerprint of the data is compared.
    path: str = _free("", "File, folder or glob; for hf also a hub name.")
    name: str = _knob("", "Configuration of a data set; hf only.")
    split: Name = _knob("train", "Split of a data set to train on; hf only.")
    revision: str = _knob("main", "Branch, tag or commit of a data set on the hub; hf only.")
    heldout_split: str = _knob(
        "", "Split to evaluate on; hf only. Empty: a fraction of the documents."
    )
    heldout_path: str = _free(
        "", "File, folder or glob to evaluate on. Empty: a fraction of the documents."
    )
    text_column: Name = _knob("text", "Field or column that holds a row's text.")
    label_column: Name = _knob("label", "Field of a row's class, an integer from 0; bert only.")
    tokenizer: Name = _knob("bytes", "bytes, a tokenizer.json, a *.model, a folder, or a hub name.")
    sequence_length: Count = _knob(128, "L, predicted tokens per row.")
    num_sequences: Count | None = _knob(None, "Upper limit of the training rows; unset: all.")
    heldout_frac: Part = _knob(
        0.05, "Fraction of documents to hold out if no held-out text is configured."
    )
    subset_frac: PartOrAll = _knob(1.0, "Fraction of the training rows that each trainer draws.")


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The trainers, and the workers that are divided among them."""

    num_trainers: Count = _knob(4, "M, trainers at the start, before merges (AdLoCo table A.2).")
    num_workers: Count = _knob(4, "R, workers of the whole pool, not per trainer.")
    initial_workers: Count | None = _knob(
        None,
        "Workers at the start; the others join as gradient noise grows (see batching.growth)."
        " Unset: the whole pool.",
    )
    spawn_frac: Part | None = _knob(None, "Fraction of the run after which all workers join.")
    model_shards: Count | None = _free(
        "auto",
        "Devices over which one worker's parameters and states are sharded. auto: as few as memory"
        " allows.",
    )


@dataclasses.dataclass(frozen=True)
class Inner:
    """What a worker does between two synchronisations: optimizer, learning rate, round length."""

    steps_per_round: Count = _knob(200, "S, updates between synchronisations (AdLoCo table A.2).")
    max_steps_per_round: Count | None = _knob(
        None,
        "Upper limit of a round in updates, a multiple of steps_per_round. Unset: the batch-size"
        " test does not lengthen rounds, and a round_length rule has no limit.",
    )
    round_length: str = _knob(
        "fixed",
        "Rule for a round's updates, in multiples of steps_per_round (docs/algorithm.md, 1)."
        " linear: up to max_steps_per_round over the run. qsr: (0.0175 / learning rate)^2.",
        table=("ROUND_LENGTHS", "fixed", "qsr", "linear"),
    )
    tx: str = _fixed(
        "adamw",
        "The workers' optimizer. muon: muon for the matrices of hidden layers and adamw for the"
        " rest, at the same rate; MuLoCo uses 0.02, with weight_decay from 5e-4 to 5e-3"
        " (arXiv 2505.23725).",
        table=("INNER_OPTIMIZERS", "adamw", "muon", "sgd"),
    )
    learning_rate: Rate = _knob(4e-4, "Peak rate; AdLoCo continues a trained model at 2e-5.")
    warmup_updates: Number = _knob(0, "Updates of a trainer in which the rate rises from zero.")
    schedule: Literal["constant", "cosine", "linear"] = _knob(
        "constant", "Rate after the warm-up; cosine and linear fall over the run's planned updates."
    )
    final_lr_frac: Decay = _knob(
        0.0, "Rate at the end of a schedule, as a fraction of the peak; nanoGPT: 0.1."
    )
    weight_decay: Weight = _knob(
        0.1, "Weight decay, which is multiplied by the rate (AdLoCo 6.1); not for sgd."
    )
    beta1: Decay = _knob(0.9, "Decay of the first moment (Kingma & Ba 2015); muon's momentum.")
    beta2: Decay = _knob(0.999, "Decay of the second moment (Kingma & Ba 2015).")
    clip_norm: Positive | None = _knob(
        None, "Limit of the gradient norm of an update. Unset: no clipping."
    )
    state: Literal["keep", "reset"] = _knob(
        "keep",
        "Whether a new round keeps or resets the moments of the workers' optimizer; AdLoCo's code"
        " resets them.",
    )


@dataclasses.dataclass(frozen=True)
class Outer:
    """How a trainer is updated with the differences of its workers, and how these are sent."""

    tx: str = _fixed(
        "nesterov",
        "The trainers' optimizer; AdLoCo uses sgd at 0.5.",
        table=("OUTER_OPTIMIZERS", "nesterov", "nesterov_by_interval", "sgd", "adamw"),
    )
    learning_rate: Rate = _knob(0.7, "Rate of the pseudo-gradient (DiLoCo: 0.7).")
    momentum: Decay = _knob(0.9, "Decay of earlier pseudo-gradients; nesterov only.")
    skip_single: bool = _knob(
        False,
        "Whether a trainer with one worker takes the worker's parameters without outer.tx.",
    )
    aggregator: str = _knob(
        "mean",
        "How workers' differences become a pseudo-gradient (docs/algorithm.md, 1).",
        table=("AGGREGATORS", "mean", "rda", "isotropic"),
    )
    precision: Literal["float32", "bfloat16", "int4"] = _knob(
        "float32",
        "Format in which outer gradients are sent; they are added in float32 (arXiv 2501.18512).",
    )
    # Streaming DiLoCo, arXiv 2501.18512, sections 2.2 and 2.3. These knobs decide whether the state
    # contains workers' own parameters, so they cannot change on resume.
    fragments: Count = _fixed(
        1,
        "Number of parts of the parameters, which are synchronised one after another within a"
        " round. 1: all parameters are synchronised at the end of a round.",
    )
    delay_updates: Number = _fixed(
        0, "Micro-batches from the sending of a fragment to its arrival; Streaming DiLoCo: 1."
    )
    mixing: Decay = _knob(
        0.0,
        "Share of a worker's own parameters in the mixture with a synchronised fragment;"
        " Streaming DiLoCo: 0.5.",
    )

    @property
    def own_params(self) -> bool:
        """Whether workers keep their own parameters between synchronisations (Streaming DiLoCo)."""
        return self.fragments > 1 or self.delay_updates > 0

    @property
    def leaves_unsynchronised(self) -> bool:
        """Whether some worker updates have not been synchronised when a round ends."""
        return self.fragments > 1 or self.mixing > 0


@dataclasses.dataclass(frozen=True)
class Batching:
    """How a worker's requested batch, counted in sequences, grows (docs/algorithm.md, 2 and 3)."""

    test: str = _knob(
        "norm",
        "Batch-size test, which requests the next batch. constant and ramp do not measure"
        " gradients.",
        table=("BATCH_TESTS", "norm", "inner_product", "augmented", "constant", "ramp"),
    )
    mode: Literal["unbiased", "paper"] = _knob(
        "unbiased", "Estimator of the tests. unbiased: without bias. paper: as in AdLoCo."
    )
    scope: Literal["trainer", "worker"] = _knob(
        "trainer",
        "Gradient that is tested. trainer: the mean of the trainer's workers. worker: of one"
        " worker.",
    )
    eta: Rate = _knob(
        0.8, "Largest ratio of noise to signal that the norm test allows (AdLoCo table A.2)."
    )
    vartheta: Rate = _knob(
        0.9, "Largest noise along the gradient that inner-product tests allow; AdLoCo: 0.01."
    )
    nu: Rate = _knob(
        1.0, "Largest noise orthogonal to the gradient that the augmented test allows."
    )
    initial_batch_size: Count = _fixed(1, "Sequences per worker at the start (AdLoCo table A.2).")
    max_batch_size: Count | None = _knob(
        "auto", "Largest micro-batch per worker. auto: the largest that fits in memory."
    )
    memory_frac: PartOrAll | None = _free(  # harmless: max_batch_size is found once, and saved
        None,
        "Fraction of a device's memory that a run may use. Unset: 0.92, on a CPU 0.8 of the RAM.",
    )
    batch_cap: Count = _knob(1024, "Upper limit of a request, in sequences per worker.")
    max_growth: Count = _knob(4, "Largest factor by which one test may raise a request.")
    growth: tuple[Literal["workers", "rounds", "batch"], ...] = _knob(
        ("workers", "rounds", "batch"),
        "Quantities that grow with the request, in this order: workers (at most twofold at a time),"
        " the length of rounds (up to inner.max_steps_per_round), the batch.",
    )
    max_blind_growth: Count | None = _knob(
        None,
        "Largest growth while the estimated signal is not positive, as a factor over the last batch"
        " with a positive signal. Unset: no limit.",
    )
    smoothing: Decay = _knob(
        0.9, "Decay of the moving averages of gradient statistics, per batch-size test."
    )
    test_batch_size: Annotated[int, "[8, 2147483647]"] | None = _knob(
        "auto",
        "Sequences of a trainer's batch-size test. auto: 4 % of the round's sequences, 8 to 256.",
    )
    buckets: tuple[Count, ...] = _knob((), "Micro-batch sizes; empty: 1, 2, 3, 4, 6, 8, 12, ...")
    ramp: tuple[tuple[Number, Number], ...] = _knob(
        (), "Schedule of test=ramp: pairs (first round, batch), such as ((0, 4), (10, 8))."
    )


@dataclasses.dataclass(frozen=True)
class Switch:
    """When a batch that is too large for a device is accumulated (docs/algorithm.md, 3)."""

    mode: Literal["threshold", "accumulate", "clip"] = _knob(
        "threshold",
        "What to do with a batch above max_batch_size. threshold: clip it up to the multiplier,"
        " accumulate above. accumulate: always accumulate. clip: always clip.",
    )
    multiplier: Count = _knob(
        2, "Multiple of max_batch_size above which mode=threshold accumulates."
    )


@dataclasses.dataclass(frozen=True)
class Merge:
    """Which trainers are merged into one, and when (docs/algorithm.md, 4)."""

    policy: str = _knob(
        "worst_with_worst",
        "Rule that selects the trainers to merge by their requested batches.",
        table=("MERGE_POLICIES", "worst_with_worst", "best_with_worst", "none"),
    )
    every_rounds: Count = _knob(3, "Rounds from one merge to the next (AdLoCo table A.2).")
    width: Several = _knob(2, "Number of trainers that are merged into one.")
    max_barrier: Amount | None = _knob(
        None,
        "Largest rise of the held-out loss, in nats/token, that a merge may cause; a merge that"
        " costs more is refused. Unset: no limit.",
    )
    on_refusal: Literal["keep", "retire"] = _knob(
        "keep",
        "After a refused merge. keep: all its trainers continue. retire: only the one with the"
        " largest request continues.",
    )


@dataclasses.dataclass(frozen=True)
class Eval:
    """When the loss on held-out text is measured; the seed of the run does not change the rows."""

    every_rounds: Count = _knob(1, "Rounds from one evaluation to the next.")
    num_sequences: Count = _knob(64, "Upper limit of the held-out rows of a reported loss.")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the whole state is saved; it is also saved at the end and at a signal."""

    every_rounds: Count | None = _knob(
        None, "Rounds from one save to the next. Unset: only every_s decides."
    )
    every_s: Amount = _knob(
        300.0, "Seconds from one save to the next; a save waits for the end of a round."
    )
    keep: Count = _knob(
        2, "Number of newest checkpoints to keep, beside the one with the lowest loss."
    )
    watchdog_s: Positive | None = _knob(
        None,
        "Seconds without a new round after which the process prints its stacks and ends. Choose"
        " more than a round takes with compilation, evaluation and save. Unset: never.",
    )


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where workers run: in this process, or in learner processes that may come and go."""

    kind: Literal["local", "ray"] = _knob(
        "local",
        "local: in this process. ray: in learners, which are processes of a Ray cluster; needs the"
        " extra ray.",
    )
    address: str = _knob(
        "",
        "HOST:PORT of the Ray cluster to join. Empty: start a cluster on this machine.",
    )
    max_learners: Count | None = _knob(
        None, "Number of learners to start. Unset: one for each worker at the start of the run."
    )
    quorum: Count | None = _knob(
        None,
        "Number of a trainer's learners whose results are enough to end its round. Unset: all.",
    )
    grace_s: Amount = _knob(
        5.0, "Seconds to wait for the other learners after the quorum is reached."
    )
    heartbeat_s: Positive = _knob(
        20.0, "Seconds without a heartbeat after which a learner counts as lost."
    )
    restart_s: Positive = _knob(
        120.0, "Seconds to wait for a learner to start; then others take over its workers."
    )
    steps: Literal["equal", "by_speed"] = _live(
        "equal", "by_speed: slower learners make fewer updates in a round (arXiv 2401.09135)."
    )
    max_norm_ratio: Positive | None = _live(
        None,
        "A learner's update is rejected if its norm is larger than the median norm of its peers by"
        " this factor. Unset: no limit.",
    )


@dataclasses.dataclass(frozen=True)
class Log:
    """What the terminal and trackers show; see `adloco_jax.run.trackers`."""

    every_rounds: Count = _knob(1, "Rounds from one line on the terminal to the next.")
    tensorboard: bool = _knob(
        False, "Write tensorboard/ in the run's folder; needs the extra tensorboard."
    )
    wandb: bool = _knob(False, "Send metrics to Weights & Biases; needs the extra wandb.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All checked settings of a run as plain Python values; a knob that is unset is None."""

    model: Model = _group("refused")
    data: Data = _group("refused")
    ensemble: Ensemble = _group("refused")
    inner: Inner = _group("accepted")
    outer: Outer = _group("accepted")
    batching: Batching = _group("accepted")
    switch: Switch = _group("accepted")
    merge: Merge = _group("accepted")
    eval: Eval = _group("harmless")
    checkpoint: Checkpoint = _group("harmless")
    log: Log = _group("harmless")
    engine: Engine = _group("harmless")
    seed: Annotated[int, "[0, 4294967295]"] = _fixed(
        0, "Random seed of the parameters, the data order, and the keys of a loss."
    )
    num_rounds: Count = _free(20, "Outer steps (AdLoCo table A.2).")
    num_tokens: Annotated[int, "[1, 4e18]"] | None = _free(
        None,
        "Number of tokens, of all trainers together, after which the run ends; schedules then"
        " depend on tokens. Unset: num_rounds ends the run.",
    )


def _declared(group: Any, prefix: str = "", resume: str = "") -> dict[str, Knob]:
    """The knobs of a group and of the groups in it, by full key such as `inner.tx`."""
    knobs = {}
    for field in dataclasses.fields(group):
        if knob := field.metadata.get("knob"):
            more = {"type": field.type, "resume": knob.resume or resume}
            knobs[prefix + field.name] = dataclasses.replace(knob, **more)
        else:
            knobs |= _declared(field.type, f"{field.name}.", field.metadata["resume"])
    return knobs


KNOBS = dict(sorted(_declared(Settings).items(), key=lambda item: "." in item[0]))
GROUPS: dict[str, Any] = {
    field.name: field.type for field in dataclasses.fields(Settings) if field.name not in KNOBS
}
