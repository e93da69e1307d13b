"""Every knob of a run: declared once with its type, its default and its range.

A config file gives a ConfigDict of these; `run.config.validate` turns it into `Settings`, which is
all that the training loop and its engine read. A new knob is one line in its group: the annotation
is its type, `_knob` its default and range, or the table whose names it takes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from adloco_jax.core.aggregate import AGGREGATORS
from adloco_jax.core.batching import BATCH_TESTS
from adloco_jax.core.merge import MERGE_POLICIES
from adloco_jax.core.optimizers import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core.round_lengths import ROUND_LENGTHS
from adloco_jax.models.architectures import ARCHITECTURES

_COUNT = "[1, 2147483647]"  # counts are int32 on the device
_COUNT_OR_0 = "[0, 2147483647]"


def _knob(default: object, within: str = "", table: Mapping[str, object] | None = None) -> Any:
    """A knob's default (of an optional one: how unset is written), a number's interval, a table."""
    return dataclasses.field(metadata={"default": default, "within": within, "table": table})


@dataclasses.dataclass(frozen=True)
class Model:
    """The model; the defaults are a Llama for bytes that a CPU trains in a minute."""

    arch: str = _knob("llama", table=ARCHITECTURES)  # the network; bert classifies whole texts
    vocab_size: int = _knob(257, "[2, 2147483647]")  # V, token ids; 257 for bytes, one ends a text
    width: int = _knob(64, _COUNT)  # D, numbers per token between layers
    num_layers: int = _knob(2, _COUNT)  # N, transformer layers
    num_heads: int = _knob(4, _COUNT)  # H, query heads
    num_kv_heads: int = _knob(2, _COUNT)  # G, each serves num_heads / num_kv_heads; llama only
    mlp_width: int = _knob(176, _COUNT)  # F, numbers per token inside a layer's MLP
    max_length: int = _knob(512, _COUNT)  # tokens, the longest context the model is meant for
    norm_eps: float = _knob(1e-5, "(0, 1)")  # added to a norm's variance
    rope_theta: float = _knob(10_000.0, "[1, 1e9]")  # base of the rotary wavelengths; llama only
    num_classes: int = _knob(2, "[2, 2147483647]")  # C, classes of texts; bert only
    dtype: Literal["float32", "bfloat16"] = _knob("float32")  # computed in; parameters stay float32
    # Its kernel. auto: cuDNN's fused one where it can be used (bfloat16 on newer NVIDIA GPUs), else
    # xla.
    attention: Literal["auto", "xla", "cudnn"] = _knob("auto")
    remat: bool = _knob(False)  # recompute each layer in the backward pass: less memory, more time
    loss_chunk: int = _knob(0, _COUNT_OR_0)  # sequences per chunk of the cross-entropy, 0: all
    # Folder in Hugging Face layout, or hub name, whose weights all trainers start from; the sizes
    # above must be its own. Empty: random weights.
    init_from: str = _knob("")
    reinit_head: bool = _knob(False)  # with init_from: a random head, the same for all trainers


@dataclasses.dataclass(frozen=True)
class Data:
    """Where text comes from, and how it becomes rows of sequence_length + 1 tokens."""

    # The kind of text, a key of data.DATA_SOURCES. stdlib: this Python's own, no download. hf: a
    # Hugging Face data set, read as it is needed.
    source: str = _knob("stdlib")
    path: str = _knob("")  # file, folder, prepared folder or glob; of hf, also a hub name
    name: str = _knob("")  # configuration of a data set; hf only
    split: str = _knob("train")  # part of a data set; hf only
    heldout_path: str = _knob("")  # as path, to evaluate on; empty: a fraction of the documents
    text_column: str = _knob("text")  # field of a JSONL row, column of hf
    label_column: str = _knob("label")  # field of its class, from 0 on; bert only
    tokenizer: str = _knob("bytes")  # bytes, or a tokenizer.json, *.model, folder or hub name
    sequence_length: int = _knob(128, _COUNT)  # L, tokens that are predicted per row
    num_sequences: int | None = _knob(None, _COUNT)  # rows to train on, at most; unset: all
    heldout_frac: float = _knob(0.05, "(0, 1)")  # of documents; not with heldout_path, prepared
    subset_frac: float = _knob(1.0, "(0, 1]")  # of the training rows, each trainer's own draw
    on_bad_shard: Literal["reject", "skip"] = _knob("reject")  # a damaged file, skipped whole
    max_bad_rows: int = _knob(0, _COUNT_OR_0)  # JSON lines to leave out before one is an error


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Trainers, and the workers they share."""

    num_trainers: int = _knob(4, _COUNT)  # M at the start; merges lower it (AdLoCo table A.2)
    num_workers: int = _knob(4, _COUNT)  # R, the whole pool, not per trainer
    # Workers that begin; the others join a trainer when its gradient noise asks for them (see
    # batching.growth). Unset: all begin.
    initial_workers: int | None = _knob(None, _COUNT)
    # Share of the run after which all others join at once, in place of the noise; unset: by noise.
    spawn_frac: float | None = _knob(None, "(0, 1)")
    # Parameters at the start. independent: each trainer draws its own, as a negative control:
    # averaging two such networks raised the loss of a character model from 2.43 to 2.67
    # (docs/algorithm.md, 1).
    init: Literal["shared", "independent"] = _knob("shared")
    # Devices that share one worker's parameters and optimizer state (fully sharded data parallel);
    # auto: no more than its memory needs.
    model_shards: int | None = _knob("auto", _COUNT)
    # Workers of one device that compute as one batch, the others after them: less memory, and on a
    # CPU less time. auto: one on a CPU, elsewhere all.
    worker_parallelism: int | None = _knob("auto", _COUNT)
    # After a merge: workers are divided again by requested batch, or those of the absorbed trainers
    # leave (docs/algorithm.md, 4).
    allocation: Literal["demand", "retire"] = _knob("demand")


@dataclasses.dataclass(frozen=True)
class Inner:
    """What a worker does between two synchronisations."""

    steps_per_round: int = _knob(200, _COUNT)  # S, from sync to sync (AdLoCo table A.2)
    # Rounds may grow to so many updates, a multiple of steps_per_round; unset: the batch-size test
    # lets none grow, and a rule's are as long as it says.
    max_steps_per_round: int | None = _knob(None, _COUNT)
    # Rule for a round's steps, in whole multiples of steps_per_round (docs/algorithm.md, 1): linear
    # to max_steps_per_round over the run; qsr: (qsr_alpha / learning rate)^2 (arXiv 2310.14423).
    round_length: str = _knob("fixed", table=ROUND_LENGTHS)
    qsr_alpha: float = _knob(0.0175, "(0, 100]")  # its ViT-B's, by AdamW at a peak rate of 0.008
    unit: Literal["updates", "microbatches"] = _knob("updates")  # that S counts (AdLoCo: latter)
    # The workers' optimizer. muon: for the matrices of hidden layers (`Architecture.label_params`),
    # adamw for the rest, at one rate: MuLoCo's is 0.02, with weight_decay from 5e-4 to 5e-3 (arXiv
    # 2505.23725).
    tx: str = _knob("adamw", table=INNER_OPTIMIZERS)
    learning_rate: float = _knob(4e-4, "(0, 100]")  # the peak; AdLoCo trains a model on at 2e-5
    warmup_updates: int = _knob(0, _COUNT_OR_0)  # linear from zero, in the trainer's own updates
    # Of the learning rate, after the warm-up; cosine and linear fall over the run's planned
    # updates, linear_after_merge over those that are left when only one trainer is.
    schedule: Literal["constant", "cosine", "linear", "linear_after_merge"] = _knob("constant")
    final_lr_frac: float = _knob(0.0, "[0, 1)")  # of the peak, where a schedule ends; nanoGPT: 0.1
    weight_decay: float = _knob(0.1, "[0, 100]")  # times the rate (AdLoCo 6.1); adamw and muon
    beta1: float = _knob(0.9, "[0, 1)")  # first moment's decay (Kingma & Ba 2015); muon's too
    beta2: float = _knob(0.999, "[0, 1)")  # decay of the second (the same source)
    clip_norm: float | None = _knob(None, "(0, 1e9]")  # of an update's gradient; unset: no clipping
    state: Literal["keep", "reset"] = _knob("keep")  # of tx, over rounds; AdLoCo's code: reset
    # The learning rate's growth with the batch over the initial batch.
    lr_on_growth: Literal["none", "sqrt", "linear"] = _knob("none")
    max_lr_growth: float | None = _knob(None, "[1, 1e9]")  # limit of that growth; unset: none


@dataclasses.dataclass(frozen=True)
class Outer:
    """What a trainer does with its workers' pseudo-gradient."""

    tx: str = _knob("nesterov", table=OUTER_OPTIMIZERS)  # of trainers; AdLoCo: sgd at 0.5
    learning_rate: float = _knob(0.7, "(0, 100]")  # of a round's pseudo-gradient (DiLoCo)
    momentum: float = _knob(0.9, "[0, 1)")  # decay of earlier pseudo-gradients; both nesterovs
    weight_decay: float = _knob(0.0, "[0, 100]")  # decoupled, times the rate; adamw only
    # A trainer with one worker takes its parameters as they are; tx begins with the second worker.
    skip_single: bool = _knob(False)
    # How a trainer's workers' differences become its pseudo-gradient (docs/algorithm.md, 1).
    aggregator: str = _knob("mean", table=AGGREGATORS)
    # Numbers in which outer gradients are sent; sums and averages are float32 (arXiv 2501.18512).
    precision: Literal["float32", "bfloat16", "int8", "int4"] = _knob("float32")
    # Of the parameters, synchronised in turn within a round. This and the next two are Streaming
    # DiLoCo's (the same source, sections 2.2 and 2.3); 1, 0 and 0: all at once, at the end.
    fragments: int = _knob(1, _COUNT)
    # Inner updates (accumulating: micro-batches) from a fragment's sending to its arrival; the
    # paper: 1.
    delay_updates: int = _knob(0, _COUNT_OR_0)
    mixing: float = _knob(0.0, "[0, 1)")  # share of a worker's own numbers that stays; paper: 0.5

    @property
    def own_params(self) -> bool:
        """Whether workers keep parameters of their own from one synchronisation to the next."""
        return self.fragments > 1 or self.delay_updates > 0

    @property
    def leaves_unsynchronised(self) -> bool:
        """Whether worker updates are unsynchronised at the end of a round."""
        return self.fragments > 1 or self.mixing > 0


@dataclasses.dataclass(frozen=True)
class Batching:
    """How the requested batch per worker grows, in sequences (docs/algorithm.md, 2 and 3)."""

    test: str = _knob("norm", table=BATCH_TESTS)  # what asks for the next batch
    # paper: the tests as AdLoCo prints them (docs/algorithm.md, 2).
    mode: Literal["unbiased", "paper"] = _knob("unbiased")
    scope: Literal["trainer", "worker"] = _knob("trainer")  # whose gradient is tested
    eta: float = _knob(0.8, "(0, 100]")  # allowed noise to signal, norm test (AdLoCo table A.2)
    # Allowed noise along the gradient, inner-product tests; AdLoCo: 0.01, see docs/algorithm.md.
    vartheta: float = _knob(0.9, "(0, 100]")
    nu: float = _knob(1.0, "(0, 100]")  # allowed orthogonal noise, augmented test
    # How per-example gradients are measured (core.gradstats); auto: taps where the model has them.
    estimator: Literal["auto", "taps", "vmap", "chunks", "jvp"] = _knob("auto")
    initial_batch_size: int = _knob(1, _COUNT)  # sequences per worker (AdLoCo table A.2)
    # Sequences per worker that a device holds: the micro-batch. auto: the largest bucket whose
    # programs fit.
    max_batch_size: int | None = _knob("auto", _COUNT)
    memory_frac: float = _knob(0.8, "(0, 1]")  # of a device's memory (on a CPU, RAM), for auto
    batch_cap: int = _knob(1024, _COUNT)  # sequences per worker; no request goes above
    max_growth: int = _knob(4, _COUNT)  # factor from one request to the next
    # What a larger request is spent on, in order: more of the pool's workers (up to num_workers;
    # twice as many at a time), longer rounds (up to inner.max_steps_per_round), larger batches
    # (up to batch_cap).
    growth: tuple[Literal["workers", "rounds", "batch"], ...] = _knob(
        ("workers", "rounds", "batch")
    )
    # Without any signal above the noise: factor over the size at which there last was one; unset:
    # any (AdLoCo).
    max_blind_growth: int | None = _knob(None, _COUNT)
    monotone: bool = _knob(True)  # a request never falls
    smoothing: float = _knob(0.9, "[0, 1)")  # decay per test of the averaged statistics
    # Sequences per trainer and test: auto (4 % of the round's, 8 to 256), or a number.
    test_batch_size: int | None = _knob("auto", "[8, 2147483647]")
    # Micro-batch sizes to compile for; empty: powers of two and their midpoints.
    buckets: tuple[int, ...] = _knob((), _COUNT)
    # Pairs (from round, batch), for test=ramp only; --config.batching.ramp="((0, 4), (10, 8))".
    ramp: tuple[tuple[int, int], ...] = _knob((), _COUNT_OR_0)
    # With test=branch: of so many rounds the last trains branches of batch B, 2B and 4B.
    branch_every_rounds: int = _knob(4, _COUNT)
    # Nats/token that a larger batch of the branches may lose (arXiv 2505.23971: 0.01).
    branch_epsilon: float = _knob(0.01, "[0, 1e9]")
    # Folder of a run whose batches are used again, trainer by trainer, or of a run with another
    # number of trainers their mean over workers, rounded up; for test=replay only.
    replay: str = _knob("")


@dataclasses.dataclass(frozen=True)
class Switch:
    """When a batch that no device holds is accumulated (docs/algorithm.md, 3)."""

    # threshold: accumulated only above the multiplier. clip: never.
    mode: Literal["threshold", "accumulate", "clip"] = _knob("threshold")
    multiplier: int = _knob(2, _COUNT)  # accumulate above this many times max_batch_size


@dataclasses.dataclass(frozen=True)
class Merge:
    """Which trainers become one, and when (docs/algorithm.md, 4)."""

    policy: str = _knob("worst_with_worst", table=MERGE_POLICIES)  # by requested batch, who merges
    every_rounds: int = _knob(3, _COUNT)  # rounds from one merge to the next (AdLoCo table A.2)
    width: int = _knob(2, "[2, 2147483647]")  # trainers that become one
    # The merged trainer's batch: the largest of theirs per worker, or kept in total.
    representative_batch: Literal["max", "total"] = _knob("max")
    max_barrier: float | None = _knob(None, "[0, 1e9]")  # nats/token a merge may cost; unset: any
    # Nats/token that the merged trainer may be worse than the best of its members; unset: any.
    max_harm: float | None = _knob(None, "[0, 1e9]")
    on_refusal: Literal["keep", "retire"] = _knob("keep")  # a refused merge's weaker trainer


@dataclasses.dataclass(frozen=True)
class Eval:
    """Loss on held-out text: on the same rows whatever the seed."""

    every_rounds: int = _knob(1, _COUNT)  # rounds from one evaluation to the next
    num_sequences: int = _knob(64, _COUNT)  # held-out rows, upper limit behind the reported figure


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the whole state is saved, besides at the end and at a signal."""

    every_rounds: int | None = _knob(None, _COUNT)  # rounds from save to save; unset: by time alone
    every_s: float = _knob(300.0, "[0, 1e9]")  # seconds from save to save, at a round's end
    keep: int = _knob(2, _COUNT)  # so many of the last; that of the lowest held-out loss stays too
    on_save_error: Literal["stop", "continue"] = _knob("stop")  # the run; older saves stay
    # End the process, with where each thread stood, if no round begins for so many seconds: more
    # than a round with its compilation, evaluation and save take. For what restarts it.
    watchdog_s: float | None = _knob(None, "(0, 1e9]")


@dataclasses.dataclass(frozen=True)
class Log:
    """What the terminal and trackers show; see `adloco_jax.run.trackers`."""

    every_rounds: int = _knob(1, _COUNT)  # rounds from line to line, on the terminal alone
    tensorboard: bool = _knob(False)  # write tensorboard/ in the run's folder; an extra
    wandb: bool = _knob(False)  # send to Weights & Biases; an extra


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run, checked: plain Python values, unset is None, test_batch_size "auto" is None."""

    model: Model
    data: Data
    ensemble: Ensemble
    inner: Inner
    outer: Outer
    batching: Batching
    switch: Switch
    merge: Merge
    eval: Eval
    checkpoint: Checkpoint
    log: Log
    seed: int = _knob(0, "[0, 4294967295]")  # of parameters, data order and a loss's keys
    num_rounds: int = _knob(20, _COUNT)  # outer steps (AdLoCo table A.2)
    # Ends the run after the round in which all trainers together have used so many; unset: rounds
    # alone end it. Schedules then fall over tokens, as growing batches make updates no measure.
    num_tokens: int | None = _knob(None, "[1, 4e18]")
