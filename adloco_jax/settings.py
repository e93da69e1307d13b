"""The knobs of a run, by group: each with its type, range, default, meaning and resume rule.

A config file returns a ConfigDict of these knobs. `config.validate` turns it into `Settings`, from
which the training loop and its engine read every setting. A new knob is one declaration in its
group.
"""

import dataclasses
from typing import Annotated, Any, Literal

from adloco_jax.knobs import (
    Amount,
    Count,
    Decay,
    Name,
    Number,
    Part,
    PartOrAll,
    Positive,
    Rate,
    Several,
    Weight,
    accepted,
    declared,
    group,
    harmless,
    knob,
    refused,
    size,
)


@dataclasses.dataclass(frozen=True)
class Model:
    """The model; the defaults are a Llama for bytes that a CPU trains in a minute."""

    arch: str = knob("llama", "bert classifies texts.", table=("ARCHITECTURES", "llama", "bert"))
    vocab_size: Several = size(257, "V, token ids; bytes need 257, of which one ends a text.")
    width: Count = size(64, "D, numbers per token between layers.")
    num_layers: Count = size(2, "N, transformer layers.")
    num_heads: Count = size(4, "H, query heads.")
    num_kv_heads: Count = size(2, "G, key/value heads, a divisor of num_heads; llama only.")
    mlp_width: Count = size(176, "F, numbers per token inside a layer's MLP.")
    max_length: Count = size(512, "Longest context of the model, in tokens.")
    norm_eps: Part = size(1e-5, "Added to the variance in each normalisation.")
    rope_theta: Annotated[float, "[1, 1e9]"] = size(1e4, "Base of rotary wavelengths; llama only.")
    num_classes: Several = size(2, "C, classes of texts; bert only.")
    dtype: Literal["float32", "bfloat16"] = accepted(
        "float32", "Type of the model's computations; parameters stay float32."
    )
    remat: bool | None = accepted(
        "auto",
        "Recompute layers in the backward pass: less memory, more time. auto: only if memory"
        " requires it.",
    )
    loss_chunk: Number = accepted(0, "Sequences per chunk of the cross-entropy; 0: all at once.")
    init_from: str = knob(
        "",
        "Weights to start from: a folder in Hugging Face layout, or a hub name. Sizes that the"
        " config sets must equal the checkpoint's. A head that the checkpoint lacks is random."
        " Empty: random weights.",
    )
    # Not a knob: config.json of the checkpoint, as text (`run.resume.with_checkpoint`).
    checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class Data:
    """Where text comes from, and how it becomes rows of sequence_length + 1 tokens."""

    source: str = knob(
        "stdlib",
        "Kind of text. stdlib: the standard library of the running Python. hf: a data set on the"
        " Hugging Face hub, a saved data set, or files. tokens: a folder that adloco prepare made.",
        table=("DATA_SOURCES", "stdlib", "text", "jsonl", "parquet", "hf", "tokens"),
    )
    # A path may change on resume, because the fingerprint of the data is compared.
    path: str = harmless("", "File, folder or glob; for hf also a hub name.")
    name: str = knob("", "Configuration of a data set; hf only.")
    split: Name = knob("train", "Split of a data set to train on; hf only.")
    revision: str = knob("main", "Branch, tag or commit of a data set on the hub; hf only.")
    heldout_split: str = knob(
        "", "Split to evaluate on; hf only. Empty: a fraction of the documents."
    )
    heldout_path: str = harmless(
        "", "File, folder or glob to evaluate on. Empty: a fraction of the documents."
    )
    text_column: Name = knob("text", "Field or column that holds a row's text.")
    label_column: Name = knob("label", "Field of a row's class, an integer from 0; bert only.")
    tokenizer: Name = knob("bytes", "bytes, a tokenizer.json, a *.model, a folder, or a hub name.")
    sequence_length: Count = knob(128, "L, predicted tokens per row.")
    num_sequences: Count | None = knob(None, "Upper limit of the training rows; unset: all.")
    heldout_frac: Part = knob(
        0.05, "Fraction of documents to hold out if no held-out text is configured."
    )
    subset_frac: PartOrAll = knob(1.0, "Fraction of the training rows that each trainer draws.")


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The trainers, and the workers that are divided among them."""

    num_trainers: Count = knob(4, "M, trainers at the start, before merges (AdLoCo table A.2).")
    num_workers: Count = knob(4, "R, workers of the whole pool, not per trainer.")
    initial_workers: Count | None = knob(
        None,
        "Workers at the start; the others join as gradient noise grows (see batching.growth)."
        " Unset: the whole pool.",
    )
    spawn_frac: Part | None = knob(None, "Fraction of the run after which all workers join.")
    model_shards: Count | None = harmless(
        "auto",
        "Devices over which one worker's parameters and states are sharded. auto: as few as memory"
        " allows.",
    )


@dataclasses.dataclass(frozen=True)
class Inner:
    """What a worker does between two synchronisations: optimizer, learning rate, round length."""

    steps_per_round: Count = knob(200, "S, updates between synchronisations (AdLoCo table A.2).")
    max_steps_per_round: Count | None = knob(
        None,
        "Upper limit of a round in updates, a multiple of steps_per_round. Unset: the batch-size"
        " test does not lengthen rounds, and a round_length rule has no limit.",
    )
    round_length: str = knob(
        "fixed",
        "Rule for a round's updates, in multiples of steps_per_round (docs/algorithm.md, 1)."
        " linear: up to max_steps_per_round over the run. qsr: (0.0175 / learning rate)^2.",
        table=("ROUND_LENGTHS", "fixed", "qsr", "linear"),
    )
    tx: str = refused(
        "adamw",
        "The workers' optimizer. muon: muon for the matrices of hidden layers and adamw for the"
        " rest, at the same rate; MuLoCo uses 0.02, with weight_decay from 5e-4 to 5e-3"
        " (arXiv 2505.23725).",
        table=("INNER_OPTIMIZERS", "adamw", "muon", "sgd"),
    )
    learning_rate: Rate = knob(4e-4, "Peak rate; AdLoCo continues a trained model at 2e-5.")
    warmup_updates: Number = knob(0, "Updates of a trainer in which the rate rises from zero.")
    schedule: Literal["constant", "cosine", "linear"] = knob(
        "constant", "Rate after the warm-up; cosine and linear fall over the run's planned updates."
    )
    final_lr_frac: Decay = knob(
        0.0, "Fraction of the peak rate at the end of a schedule; nanoGPT: 0.1."
    )
    weight_decay: Weight = knob(0.1, "Weight decay, times the rate (AdLoCo 6.1); not for sgd.")
    decay: Literal["all", "matrices"] = refused(
        "all",
        "Parameters that weight_decay shrinks. all: norms and biases too, as in AdLoCo's code."
        " matrices: matrices and embedding tables only.",
    )
    beta1: Decay = knob(0.9, "Decay of the first moment (Kingma & Ba 2015); muon's momentum.")
    beta2: Decay = knob(0.999, "Decay of the second moment (Kingma & Ba 2015).")
    clip_norm: Positive | None = knob(
        None, "Limit of the gradient norm of an update. Unset: no clipping."
    )
    state: Literal["keep", "reset"] = knob(
        "keep",
        "Whether a new round keeps or resets the moments of the workers' optimizer; AdLoCo's code"
        " resets them.",
    )


@dataclasses.dataclass(frozen=True)
class Outer:
    """How a trainer is updated with the differences of its workers, and how these are sent."""

    tx: str = refused(
        "nesterov",
        "The trainers' optimizer; AdLoCo uses sgd at 0.5.",
        table=("OUTER_OPTIMIZERS", "nesterov", "nesterov_by_interval", "sgd", "adamw"),
    )
    learning_rate: Rate = knob(0.7, "Rate of the pseudo-gradient (DiLoCo: 0.7).")
    momentum: Decay = knob(0.9, "Decay of earlier pseudo-gradients; nesterov only.")
    skip_single: bool = knob(
        False,
        "Whether a trainer with one worker takes the worker's parameters without outer.tx.",
    )
    aggregator: str = knob(
        "mean",
        "How workers' differences become a pseudo-gradient (docs/algorithm.md, 1).",
        table=("AGGREGATORS", "mean", "rda"),
    )
    precision: Literal["float32", "bfloat16", "int4"] = knob(
        "float32",
        "Format in which outer gradients are sent; they are added in float32 (arXiv 2501.18512).",
    )
    # Streaming DiLoCo, arXiv 2501.18512, sections 2.2 and 2.3. These knobs decide whether the state
    # contains workers' own parameters, so they cannot change on resume.
    fragments: Count = refused(
        1,
        "Number of parts of the parameters, which are synchronised one after another within a"
        " round. 1: all parameters are synchronised at the end of a round.",
    )
    delay_updates: Number = refused(
        0, "Micro-batches from the sending of a fragment to its arrival; Streaming DiLoCo: 1."
    )
    mixing: Decay = knob(
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

    test: str = knob(
        "norm",
        "Batch-size test, which requests the next batch. constant and ramp do not measure"
        " gradients.",
        table=("BATCH_TESTS", "norm", "inner_product", "augmented", "constant", "ramp"),
    )
    mode: Literal["unbiased", "paper"] = knob(
        "unbiased", "Estimator of the tests. unbiased: without bias. paper: as in AdLoCo."
    )
    scope: Literal["trainer", "worker"] = knob(
        "trainer",
        "Gradient that is tested. trainer: the mean of the trainer's workers. worker: of one"
        " worker.",
    )
    eta: Rate = knob(0.8, "Largest ratio of noise to signal in the norm test (AdLoCo table A.2).")
    vartheta: Rate = knob(
        0.9, "Largest noise along the gradient that inner-product tests allow; AdLoCo: 0.01."
    )
    nu: Rate = knob(1.0, "Largest noise orthogonal to the gradient that the augmented test allows.")
    initial_batch_size: Count = refused(1, "Sequences per worker at the start (AdLoCo table A.2).")
    max_batch_size: Count | None = knob(
        "auto", "Largest micro-batch per worker. auto: the largest that fits in memory."
    )
    # memory_frac may change on resume, because max_batch_size is found once, and saved.
    memory_frac: PartOrAll | None = harmless(
        None,
        "Fraction of a device's memory that a run uses. Unset: 0.92; on a CPU, 0.8 of the RAM.",
    )
    batch_cap: Count = knob(1024, "Upper limit of a request, in sequences per worker.")
    max_growth: Count = knob(4, "Largest factor by which one test may raise a request.")
    growth: tuple[Literal["workers", "rounds", "batch"], ...] = knob(
        ("workers", "rounds", "batch"),
        "Quantities that grow with the request, in this order: workers (at most twofold at a time),"
        " the length of rounds (up to inner.max_steps_per_round), the batch.",
    )
    max_blind_growth: Count | None = knob(
        None,
        "Largest growth while the estimated signal is not positive, as a factor over the last batch"
        " with a positive signal. Unset: no limit.",
    )
    smoothing: Decay = knob(0.9, "Decay of the moving averages of each test's gradient statistics.")
    test_batch_size: Annotated[int, "[8, 2147483647]"] | None = knob(
        "auto",
        "Sequences of a trainer's batch-size test. auto: 4 % of the round's sequences, 8 to 256.",
    )
    buckets: tuple[Count, ...] = knob((), "Micro-batch sizes; empty: 1, 2, 3, 4, 6, 8, 12, ...")
    ramp: tuple[tuple[Number, Number], ...] = knob(
        (), "Schedule of test=ramp: pairs (first round, batch), such as ((0, 4), (10, 8))."
    )


@dataclasses.dataclass(frozen=True)
class Switch:
    """When a batch that is too large for a device is accumulated (docs/algorithm.md, 3)."""

    mode: Literal["threshold", "accumulate", "clip"] = knob(
        "threshold",
        "What to do with a batch above max_batch_size. threshold: clip it up to the multiplier,"
        " accumulate above. accumulate: always accumulate. clip: always clip.",
    )
    multiplier: Count = knob(2, "Multiple of max_batch_size above which threshold accumulates.")


@dataclasses.dataclass(frozen=True)
class Merge:
    """Which trainers are merged into one, and when (docs/algorithm.md, 4)."""

    policy: str = knob(
        "worst_with_worst",
        "Rule that selects the trainers to merge by their requested batches.",
        table=("MERGE_POLICIES", "worst_with_worst", "best_with_worst", "none"),
    )
    every_rounds: Count = knob(3, "Rounds from one merge to the next (AdLoCo table A.2).")
    width: Several = knob(2, "Number of trainers that are merged into one.")
    max_barrier: Amount | None = knob(
        None,
        "Largest rise of the held-out loss, in nats/token, that a merge may cause; a merge that"
        " costs more is refused. Unset: no limit.",
    )
    on_refusal: Literal["keep", "retire"] = knob(
        "keep",
        "After a refused merge. keep: all its trainers continue. retire: only the one with the"
        " largest request continues.",
    )


@dataclasses.dataclass(frozen=True)
class Eval:
    """When the loss on held-out text is measured; the seed of the run does not change the rows."""

    every_rounds: Count = knob(1, "Rounds from one evaluation to the next.")
    num_sequences: Count = knob(64, "Upper limit of the held-out rows of a reported loss.")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the whole state is saved; it is also saved at the end and at a signal."""

    every_rounds: Count | None = knob(
        None, "Rounds from one save to the next. Unset: only every_s decides."
    )
    every_s: Amount = knob(
        300.0, "Seconds from one save to the next; each waits for a round's end."
    )
    keep: Count = knob(2, "Newest checkpoints to keep, beside the one with the lowest loss.")
    watchdog_s: Positive | None = knob(
        None,
        "Seconds without a new round after which the process prints its stacks and ends. Choose"
        " more than a round takes with compilation, evaluation and save. Unset: never.",
    )


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where workers run: in this process, or in learner processes that may come and go."""

    kind: Literal["local", "ray"] = knob(
        "local",
        "local: in this process. ray: in learners, which are processes of a Ray cluster; needs the"
        " extra ray.",
    )
    address: str = knob("", "HOST:PORT of a Ray cluster to join. Empty: start one on this machine.")
    max_learners: Count | None = knob(
        None, "Number of learners to start. Unset: one for each worker at the start of the run."
    )
    quorum: Count | None = knob(
        None, "Number of a trainer's learners whose results suffice to end its round. Unset: all."
    )
    grace_s: Amount = knob(5.0, "Seconds to wait for other learners after the quorum is reached.")
    heartbeat_s: Positive = knob(20.0, "Seconds without a heartbeat after which a learner is lost.")
    restart_s: Positive = knob(
        120.0, "Seconds to wait for a learner to start; then others take over its workers."
    )
    steps: Literal["equal", "by_speed"] = accepted(
        "equal", "by_speed: slower learners make fewer updates in a round (arXiv 2401.09135)."
    )
    max_norm_ratio: Positive | None = accepted(
        None,
        "A worker's update is rejected if its norm is larger by this factor than the median of the"
        " trainer's other workers. Two workers are compared with the trainer's last accepted"
        " updates, a single one with nothing. Unset: no limit.",
    )


@dataclasses.dataclass(frozen=True)
class Log:
    """What the terminal and trackers show; see `adloco_jax.run.trackers`."""

    every_rounds: Count = knob(1, "Rounds from one line on the terminal to the next.")
    every_updates: Count | None = knob(
        None, "Updates from one training loss in the ledger to the next. Unset: ten a round."
    )
    tensorboard: bool = knob(
        False, "Write tensorboard/ in the run's folder; needs the extra tensorboard."
    )
    wandb: bool = knob(False, "Send metrics to Weights & Biases; needs the extra wandb.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All checked settings of a run as plain Python values; a knob that is unset is None."""

    model: Model = group("refused")
    data: Data = group("refused")
    ensemble: Ensemble = group("refused")
    inner: Inner = group("accepted")
    outer: Outer = group("accepted")
    batching: Batching = group("accepted")
    switch: Switch = group("accepted")
    merge: Merge = group("accepted")
    eval: Eval = group("harmless")
    checkpoint: Checkpoint = group("harmless")
    log: Log = group("harmless")
    engine: Engine = group("harmless")
    seed: Annotated[int, "[0, 4294967295]"] = refused(
        0, "Random seed of the parameters, the data order, and the keys of a loss."
    )
    num_rounds: Count = harmless(20, "Outer steps (AdLoCo table A.2).")
    num_tokens: Annotated[int, "[1, 4e18]"] | None = harmless(
        None,
        "Number of tokens, of all trainers together, after which the run ends; schedules then"
        " depend on tokens. Unset: num_rounds ends the run.",
    )


KNOBS = dict(sorted(declared(Settings).items(), key=lambda item: "." in item[0]))
GROUPS: dict[str, Any] = {
    field.name: field.type for field in dataclasses.fields(Settings) if field.name not in KNOBS
}
