"""The settings of a run: every option, by group, with its type, limits, default, meaning and rules.

An option is a field, and the text below it its meaning. "harmless", "accepted" (with
--accept-config-change) or "refused" in the annotation of a field, or else of its group, says
whether it may change when a run is resumed. Does not import JAX.

A key is an option's name with its group, such as `inner.tx`. A table maps names to what a user can
choose by name, such as optimizers; config files can add entries. A trainer is a model in training;
its workers train copies of it, and a synchronisation brings these together. It may send the
parameters in parts, fragments, one after another. An adapter is small matrices that are trained
beside frozen weights. A learner is a process of its own that trains workers, for the driver, the
process that holds the run.
"""

import inspect
import math
import operator
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo

# What another value of an option means for a run that is resumed: it goes on, it goes on if the
# user accepts that, or it would be another run.
Change = Literal["harmless", "accepted", "refused"]
# The public tables, such as `BATCH_TESTS`, by name.
Tables: TypeAlias = Mapping[str, Mapping[str, Any]]
# A broken rule: the keys of the options that it is about, separated by spaces, and what to do.
Rule: TypeAlias = tuple[str, str]

INT32 = 2**31 - 1  # counts have to fit into int32, because devices store them so
Count: TypeAlias = Annotated[int, Field(ge=1, le=INT32)]
Number: TypeAlias = Annotated[int, Field(ge=0, le=INT32)]
Several: TypeAlias = Annotated[int, Field(ge=2, le=INT32)]
Rate: TypeAlias = Annotated[float, Field(gt=0, le=100)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Part: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
PartOrAll: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Weight: TypeAlias = Annotated[float, Field(ge=0, le=100)]
Amount: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Name: TypeAlias = Annotated[str, Field(min_length=1)]
# The speed of a link in a config or an option, such as "10Mbit/s".
LINK = r"[1-9]\d{0,5}[kMG]bit/s"
Link: TypeAlias = Annotated[str, Field(pattern=f"^({LINK})?$")]

# An option that a config unsets with "auto". In `Settings` it is then None.
AUTO = BeforeValidator(lambda value: None if value == "auto" else value)
# The values of `data.text_column` that name the columns of chats.
CHATS = ("messages", "conversations", "prompt+completion", "instruction+output")
_SHOWN_CHARACTERS = 200  # of a value in a message
# A field that is no option: it is recorded with the settings, and no config has it.
RECORDED = "recorded"


class Entry(NamedTuple):
    """Annotates an option that names an entry of a public table."""

    table: str  # such as "BATCH_TESTS"
    names: str  # the entries that the package has, separated by spaces

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Add the names to pydantic's JSON schema of the option, from which docs are made."""
        return handler(schema) | {"examples": self.names.split()}


class Found(NamedTuple):
    """Annotates an option that `config.completed` finds if a config leaves it unset.

    `key` is the option of the group that says where: without it, or if nothing is found, the option
    has the default of the field. `words` describe what is found.
    """

    key: str
    words: str


# What a checkpoint's `config.json` and the files of `data.path` say of options left unset.
_SIZE = Found("init_from", "that of the checkpoint")
_OF_FILES = Found("path", "that of the files")


class SettingsGroup(
    BaseModel, strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True
):
    """A group of options; `faults` checks its rules."""

    @property
    def unset(self) -> set[str]:
        """The names of the options that `config.completed` has still to find.

        They are annotated with `Found`, the config does not set them, and it says where to look.
        """
        names = set()
        for name, field in type(self).model_fields.items():
            if name in self.model_fields_set:  # pydantic's: the fields that were given a value
                continue
            for mark in field.metadata:
                # Where to look is another option, such as `data.path`. If that is empty, there is
                # nothing to find, and the default of the field counts.
                if isinstance(mark, Found) and getattr(self, mark.key):
                    names.add(name)
        return names

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the rules about combinations of options that are broken; here there are none.

        Called only if each option that names an entry of `tables` names one that there is. Keys of
        a rule are without the name of the group.
        """
        yield from ()

    def _unknown_names(self, tables: Tables) -> list[Rule]:
        """Return a broken rule for each option of this group whose table lacks what it names."""
        broken = []
        for name, field in type(self).model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Entry) and getattr(self, name) not in tables[mark.table]:
                    known = " or ".join(repr(entry) for entry in tables[mark.table])
                    broken.append((name, f"must be {known}"))
        return broken

    def faults(self, tables: Tables) -> list[str]:
        """Describe each fault on a line: a name that its table lacks, or else a broken rule.

        The faults of the groups come first. Rules about several groups are checked only if all
        names are known, because rules look them up. A rule about an option that is still to be
        found does not count. Each line ends with what to do.
        """
        # A whole config has groups, and a group has none.
        groups = [value for _, value in self if isinstance(value, SettingsGroup)]
        lines: list[str] = []
        for group in groups:
            lines += group.faults(tables)
        broken = self._unknown_names(tables)
        all_known = not broken and not any(group._unknown_names(tables) for group in groups)
        if all_known:
            broken = list(self.broken_rules(tables))
        for keys, need in broken:
            if self.unset.isdisjoint(keys.split()):
                lines.append(f"{self._values(keys)}: {need}")
        return lines

    @property
    def group(self) -> str:
        """The name of the group, such as "inner"; empty for a whole config."""
        if isinstance(self, Config):
            return ""
        return type(self).__name__.removesuffix("Settings").lower()

    def _values(self, keys: str) -> str:
        """Write options, by keys that are separated by spaces, as `group.name = value, ...`."""
        prefix = f"{self.group}." if self.group else ""
        pairs = []
        for key in keys.split():
            value = operator.attrgetter(key)(self)  # of a whole config, keys have their group
            pairs.append(f"{prefix}{key} = {shown(value)}")
        return ", ".join(pairs)


def even_sizes(num_trainers: int, num_workers: int) -> tuple[int, ...]:
    """Divide workers among trainers as evenly as possible; return how many each trainer has."""
    # Trainer m's workers end at the fraction (m + 1) / M of the pool, rounded up.
    ends = [math.ceil(m * num_workers / num_trainers) for m in range(num_trainers + 1)]
    return tuple(end - start for start, end in pairwise(ends))


def shown(value: object) -> str:
    """Represent a value as text on one line, cut after `_SHOWN_CHARACTERS`, for a message."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class ModelSettings(SettingsGroup):
    """The model; the defaults are a Llama for bytes that a CPU trains in a minute."""

    arch: Annotated[str, Entry("ARCHITECTURES", "llama bert")] = "llama"
    """bert classifies texts."""
    vocab_size: Annotated[Several, _SIZE] = 257
    """V, token ids; bytes need 257, of which one ends a text."""
    width: Annotated[Count, _SIZE] = 64
    """D, numbers per token between layers."""
    num_layers: Annotated[Count, _SIZE] = 2
    """N, transformer layers."""
    num_heads: Annotated[Count, _SIZE] = 4
    """H, query heads."""
    num_kv_heads: Annotated[Count, _SIZE] = 2
    """G, key/value heads, a divisor of num_heads; llama only."""
    mlp_width: Annotated[Count, _SIZE] = 176
    """F, numbers per token inside a layer's MLP."""
    max_length: Annotated[Count, _SIZE] = 512
    """Longest context of the model, in tokens."""
    norm_eps: Annotated[Part, _SIZE] = 1e-5
    """Added to the variance in each normalisation."""
    rope_theta: Annotated[float, Field(ge=1, le=1e9), _SIZE] = 1e4
    """Base of rotary wavelengths; llama only."""
    num_classes: Annotated[Several, _SIZE] = 2
    """C, classes of texts; bert only."""
    dtype: Annotated[Literal["float32", "bfloat16"], "accepted"] = "float32"
    """Type of the model's computations; parameters stay float32."""
    base_dtype: Annotated[Literal["float32", "bfloat16", "int8", "nf4"] | None, AUTO] = None
    """How the frozen weights of an adapter are held; int8 and nf4 (four bits): the matrices of
    layers are, the others in bfloat16. auto: bfloat16 if it fits by the plan, else nf4."""
    remat: Annotated[bool | None, AUTO, "accepted"] = None
    """Recompute layers in the backward pass, which saves memory. auto: if memory requires it."""
    loss_chunk: Annotated[Number, "accepted"] = 0
    """Sequences per chunk of the cross-entropy; 0: all at once. A sequence of more than 134 million
    logits counts as several."""
    init_from: str = ""
    """Weights to start from: a folder in Hugging Face layout, its address, or a hub name. Sizes set
    here must equal the checkpoint's. A head that it lacks is random. Empty: random weights."""
    # Not an option: config.json of the checkpoint, as text (`config.completed`).
    checkpoint: Annotated[str, RECORDED] = ""

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about the architecture: keys, and what to do."""
        # A rule: names of options, whether their values go together (a function), and what to do.
        for names, holds, need in tables["ARCHITECTURES"][self.arch].rules:
            values = [getattr(self, name) for name in names]
            if not holds(*values):
                yield " ".join(names), need


class AdapterSettings(SettingsGroup):
    """Small matrices A and B that are trained beside frozen weights, instead of these (LoRA)."""

    rank: Number = 0
    """Columns of A and rows of B. 0: no adapter, all weights are trained."""
    alpha: Positive = 32.0
    """alpha / rank scales the product A B that is added to a weight."""
    layers: Literal["attention", "mlp", "all"] = "all"
    """Linear layers of a block that have an adapter."""


class DataSettings(SettingsGroup):
    """Where text comes from, and how it becomes rows of sequence_length + 1 tokens."""

    source: Annotated[str, Entry("DATA_SOURCES", "stdlib text jsonl parquet hf"), _OF_FILES] = (
        "stdlib"
    )
    """Kind of text. stdlib: the standard library of the running Python. hf: a data set on the
    Hugging Face hub, a saved data set, or files. Unset: by the names of the files."""
    path: Annotated[str, "harmless"] = ""
    """File, folder or glob, here or at an address such as s3://; for hf also a hub name."""
    name: str = ""
    """Configuration of a data set; hf only."""
    split: Name = "train"
    """Split of a data set to train on; hf only."""
    revision: str = "main"
    """Branch, tag or commit of a data set on the hub; hf only."""
    heldout_split: str = ""
    """Split to evaluate on; hf only. Empty: a fraction of the documents."""
    heldout_path: Annotated[str, "harmless"] = ""
    """File, folder or glob to evaluate on. Empty: a fraction of the documents."""
    text_column: Annotated[Name, _OF_FILES] = "text"
    """Field or column that holds a row's text. messages, conversations, prompt+completion (as TRL
    reads them) and instruction+output (Alpaca's): chats in these columns. Unset: chats if the first
    row has their columns."""
    label_column: Name = "label"
    """Field of a row's class, an integer from 0; bert only."""
    tokenizer: Name | None = None
    """bytes, a *.json, a *.model, a folder, a hub name. Unset: model.init_from's; bytes without."""
    sequence_length: Count = 128
    """L, predicted tokens per row."""
    template: Annotated[str, "harmless"] = ""
    """File with the Jinja template that renders chats. Empty: the tokenizer's."""
    loss: Literal["answers", "all"] = "answers"
    """Which tokens of chats count: those of answers, or all. Of other text all count."""
    attention: Literal["row", "document"] = "row"
    """What a token attends to before it: its row, or only its own document in the row, as
    in chats."""
    num_sequences: Count | None = None
    """Upper limit of the training rows; unset: all."""
    heldout_frac: Part = 0.05
    """Fraction of documents to hold out if no held-out text is configured."""
    skip_bad: Annotated[Number, "harmless"] = 0
    """Most rows to leave out because they are malformed, such as chats with an empty answer."""
    subset_frac: PartOrAll = 1.0
    """Fraction of the training rows that each trainer draws."""
    # Not an option: the date that a template of chats writes, of the first preparation.
    date: Annotated[str, RECORDED] = ""

    @property
    def is_chat(self) -> bool:
        """Whether rows hold chats."""
        return self.text_column in CHATS

    @property
    def separates_documents(self) -> bool:
        """Whether a model sees the documents or chats of a row apart: rows are a `RowBatch`."""
        return self.is_chat or self.attention == "document"

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about the source: keys, and what to do."""
        # `needs` names the options that the source needs, and `refuses` those that must keep their
        # default, each with the reason.
        source = tables["DATA_SOURCES"][self.source]
        if self.is_chat and "text_column" not in source.needs:
            yield (
                "source text_column",
                "only jsonl, parquet and hf hold chats; set the first",
            )
        if not self.is_chat and (self.template or self.loss == "all"):
            need = f"only chats have the last two; set the first to {' or '.join(CHATS)}"
            yield "text_column template loss", need
        if "path" in source.needs and not self.path:
            yield "source path", "needs a file, folder or glob (hf: or a hub name); set data.path"
        if "path" not in source.needs and (self.path or self.heldout_path):
            yield "source path heldout_path", "reads no files; set another source, or no path"
        for name, need in source.refuses.items():
            if getattr(self, name) != OPTIONS[f"data.{name}"].default:
                yield f"source {name}", need


class EnsembleSettings(SettingsGroup):
    """The trainers, and the workers that are divided among them."""

    num_trainers: Count = 4
    """M, trainers at the start, before merges (AdLoCo table A.2)."""
    num_workers: Annotated[
        Count, Found("num_trainers", "with learners engine.max_learners or 2")
    ] = 4
    """R, workers of all trainers together."""
    initial_workers: Count | None = None
    """Workers at the start; the others join as noise grows (see batching.growth). Unset: all."""
    spawn_frac: Part | None = None
    """Fraction of the run after which all workers join."""
    model_shards: Annotated[Count | None, AUTO, "harmless"] = None
    """Devices over which one worker's parameters and states are sharded. auto: as few as fit."""

    def sizes(self, *, whole_pool: bool = False) -> tuple[int, ...]:
        """Return each trainer's number of workers at the start, or once all workers have joined."""
        num_workers = self.num_workers if whole_pool else self.initial_workers
        if num_workers is None:  # all workers are there from the start
            num_workers = self.num_workers
        return even_sizes(self.num_trainers, num_workers)

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about numbers of workers: keys, and what to do."""
        first = self.initial_workers
        if self.num_workers < self.num_trainers:
            yield "num_workers num_trainers", "each trainer needs a worker; raise the first"
        if first is not None and not self.num_trainers <= first <= self.num_workers:
            yield "initial_workers num_trainers num_workers", "must lie between these; change it"
        if self.spawn_frac is not None and first is None:
            yield "spawn_frac initial_workers", "the first needs the second; set both"


class InnerSettings(SettingsGroup):
    """What a worker does between two synchronisations: optimizer, learning rate, round length."""

    steps_per_round: Count = 200
    """S, updates between synchronisations (AdLoCo table A.2)."""
    max_steps_per_round: Count | None = None
    """Upper limit of a round in updates. Unset: no limit for round_length; the batch-size test does
    not lengthen rounds."""
    round_length: Annotated[str, Entry("ROUND_LENGTHS", "fixed")] = "fixed"
    """Rule for a round's updates, in multiples of steps_per_round (docs/algorithm.md, 1). A config
    file can add others: examples/round_length.py."""
    tx: Annotated[str, Entry("INNER_OPTIMIZERS", "adamw muon sgd"), "refused"] = "adamw"
    """The workers' optimizer. muon: muon for the matrices of hidden layers and adamw for the rest,
    at the same rate; MuLoCo uses 0.02, with weight_decay from 5e-4 to 5e-3 (arXiv 2505.23725)."""
    learning_rate: Rate = 4e-4
    """Peak rate; AdLoCo continues a trained model at 2e-5."""
    warmup_updates: Number = 0
    """Updates of a trainer in which the rate rises from zero."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Rate after the warm-up; cosine and linear fall over the run's planned updates."""
    final_lr_frac: Decay = 0.0
    """Fraction of the peak rate at the end of a schedule; nanoGPT: 0.1."""
    weight_decay: Weight = 0.1
    """Weight decay, times the rate (AdLoCo 6.1); not for sgd."""
    decay: Annotated[Literal["all", "matrices"], "refused"] = "all"
    """all: norms and biases decay too (AdLoCo's code). matrices: only matrices and embeddings."""
    beta1: Decay = 0.9
    """Decay of the first moment (Kingma & Ba 2015); muon's momentum."""
    beta2: Decay = 0.999
    """Decay of the second moment (Kingma & Ba 2015)."""
    clip_norm: Positive | None = None
    """Limit of the gradient norm of an update. Unset: no clipping."""
    state: Literal["keep", "reset"] = "keep"
    """What a new round does with the moments of the workers' optimizer; AdLoCo's code: reset."""

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about rounds, rate and optimizer: keys, and what to do."""
        if self.max_steps_per_round and self.max_steps_per_round % self.steps_per_round:
            yield "max_steps_per_round steps_per_round", "the first must be a multiple; change it"
        if self.schedule == "constant" and self.final_lr_frac > 0:
            yield "schedule final_lr_frac", "a constant rate does not fall; set the second to 0.0"
        if self.tx == "sgd" and self.weight_decay > 0:
            yield "tx weight_decay", "sgd decays no weights; set inner.weight_decay=0.0"


class OuterSettings(SettingsGroup):
    """How a trainer is updated with the differences of its workers, and how these are sent."""

    tx: Annotated[str, Entry("OUTER_OPTIMIZERS", "nesterov sgd adamw"), "refused"] = "nesterov"
    """The trainers' optimizer; AdLoCo uses sgd at 0.5."""
    learning_rate: Rate = 0.7
    """Rate of the pseudo-gradient (DiLoCo: 0.7)."""
    momentum: Decay = 0.9
    """Decay of earlier pseudo-gradients; not for sgd and adamw."""
    skip_single: bool = False
    """Whether a trainer with one worker takes the worker's parameters without outer.tx."""
    aggregator: Annotated[str, Entry("AGGREGATORS", "mean")] = "mean"
    """How workers' differences become a pseudo-gradient (docs/algorithm.md, 1). A config file can
    add others: examples/aggregator.py, examples/radial.py."""
    precision: Literal["float32", "bfloat16", "int4"] = "float32"
    """Format of outer gradients and updates when sent; sums are float32 (arXiv 2501.18512)."""
    clip_workers: Annotated[float, Field(ge=1, le=1e9)] = 3.0
    """In learners: largest norm of a worker's difference, per update, in medians of its trainer's
    last accepted ones. Larger differences are scaled down to it."""
    fragments: Annotated[Count, "refused"] = 1
    """Parts of the parameters, synchronised one after another within a round. 1: all at its end."""
    delay_updates: Annotated[Number, "refused"] = 0
    """Micro-batches from the sending of a fragment to its arrival; Streaming DiLoCo: 1."""
    mixing: Decay = 0.0
    """Share of a worker's own parameters in a synchronised fragment; Streaming DiLoCo: 0.5."""
    average: Annotated[Decay, "refused"] = 0.0
    """Share of the old in a running average of each trainer's parameters over rounds, evaluated and
    exported in place of the last ones; workers do not train on it. 0: off."""

    @property
    def own_params(self) -> bool:
        """Whether workers keep their own parameters between synchronisations (Streaming DiLoCo)."""
        return self.fragments > 1 or self.delay_updates > 0

    @property
    def leaves_unsynchronised(self) -> bool:
        """Whether some worker updates have not been synchronised when a round ends."""
        return self.fragments > 1 or self.mixing > 0

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about fragments: keys, and what to do."""
        if self.fragments > 1 and (self.tx == "adamw" or self.aggregator != "mean"):
            yield "fragments tx aggregator", "fragments need the mean, not adamw; set fragments=1"
        if self.mixing > 0 and not self.own_params:
            yield "mixing fragments delay_updates", "mixing needs one of the others; set it to 0.0"


class BatchingSettings(SettingsGroup):
    """How a worker's requested batch, counted in sequences, grows (docs/algorithm.md, 2 and 3)."""

    test: Annotated[str, Entry("BATCH_TESTS", "norm inner_product augmented constant ramp")] = (
        "norm"
    )
    """What requests the next batch. constant and ramp do not measure gradients."""
    mode: Literal["unbiased", "paper"] = "unbiased"
    """Estimator of the tests. unbiased: without bias. paper: as in AdLoCo."""
    scope: Literal["trainer", "worker"] = "trainer"
    """Gradient that is tested. trainer: the mean of the trainer's workers. worker: of one."""
    eta: Rate = 0.8
    """Largest ratio of the mean gradient's deviation to the gradient's norm in the norm test
    (AdLoCo table A.2)."""
    vartheta: Rate = 0.9
    """Largest noise along the gradient that inner-product tests allow; AdLoCo: 0.01."""
    nu: Rate = 1.0
    """Largest noise orthogonal to the gradient that the augmented test allows."""
    initial_batch_size: Annotated[Count, "refused"] = 1
    """Sequences per worker at the start (AdLoCo table A.2)."""
    max_batch_size: Annotated[Count | None, AUTO] = None
    """Largest micro-batch per worker. auto: the first batch if batches do not grow, else the
    largest that fits in memory; on a CPU at most what a pass takes at once."""
    memory_frac: Annotated[PartOrAll | None, "harmless"] = None
    """Fraction of a device's memory that a run uses. Unset: 0.92; on a CPU, 0.8 of the RAM."""
    batch_cap: Annotated[
        Count, Found("initial_batch_size", "the first batch if batches do not grow")
    ] = 1024
    """Upper limit of a request, in sequences per worker; at least the first batch."""
    max_growth: Count = 4
    """Largest factor by which one test may raise a request."""
    growth: tuple[Literal["workers", "rounds", "batch"], ...] = ("workers", "rounds", "batch")
    """What grows with the request, in this order: workers (at most twofold at a time), the length
    of rounds (up to inner.max_steps_per_round), the batch."""
    max_blind_growth: Count | None = None
    """Largest growth while the estimated signal is not positive, as a factor over the last workers
    x round length x batch with a positive signal. Unset: no limit."""
    smoothing: Decay = 0.9
    """Decay of the moving averages of each test's gradient statistics."""
    test_batch_size: Annotated[int | None, Field(ge=8, le=INT32), AUTO] = None
    """Sequences of a trainer's batch-size test. auto: 4 % of the round's sequences, 8 to 256."""
    buckets: tuple[Count, ...] = ()
    """Micro-batch sizes up to max_batch_size, which is always one; empty: 1, 2, 3, 4, 6, 8, ..."""
    ramp: tuple[tuple[Number, Number], ...] = ()
    """Schedule of test=ramp: pairs (first round, batch), such as ((0, 4), (10, 8))."""

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about growth and sizes of batches: keys, and what to do."""
        first = self.initial_batch_size
        largest = self.max_batch_size
        cap = self.batch_cap
        names_twice = len(set(self.growth)) < len(self.growth)
        if not self.growth or names_twice:
            yield "growth", "must name some of workers, rounds, batch; list each once"
        for key, limit in (("max_batch_size", largest), ("batch_cap", cap)):
            if limit is not None and first > limit:
                need = f"the first is larger; set batching.{key}={first}"
                yield f"initial_batch_size {key}", need
        # Without a largest micro-batch of its own, the run takes one of the buckets for it.
        if self.buckets and not largest and not any(first <= n <= cap for n in self.buckets):
            yield "buckets initial_batch_size batch_cap", "no bucket lies between the two; add one"
        has_ramp = self.ramp != ()
        if (self.test == "ramp") != has_ramp:
            yield "test ramp", "test='ramp' and (round, batch) pairs need each other; set both"
        if has_ramp:
            rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.ramp))
            _, last_batch = self.ramp[-1]
            if self.ramp[0] != (0, first) or not rises or last_batch > cap:
                need = "starts at (0, first batch); rounds increase, batches never fall, to the cap"
                yield "ramp initial_batch_size batch_cap", need


class SwitchSettings(SettingsGroup):
    """When a batch that is too large for a device is accumulated (docs/algorithm.md, 3)."""

    mode: Literal["threshold", "accumulate", "clip"] = "threshold"
    """What to do with a batch above max_batch_size. threshold: clip it up to the multiplier,
    accumulate above. accumulate: always accumulate. clip: always clip."""
    multiplier: Count = 2
    """Multiple of max_batch_size above which threshold accumulates."""


class MergeSettings(SettingsGroup):
    """Which trainers are merged into one, and when (docs/algorithm.md, 4)."""

    policy: Annotated[str, Entry("MERGE_POLICIES", "worst_with_worst best_with_worst none")] = (
        "worst_with_worst"
    )
    """Rule that selects the trainers to merge by their requested batches."""
    every_rounds: Count = 3
    """Rounds from one merge to the next (AdLoCo table A.2)."""
    width: Several = 2
    """Number of trainers that are merged into one."""
    max_barrier: Amount | None = None
    """Largest rise of the held-out loss, in nats/token, by an accepted merge. Unset: no limit."""
    on_refusal: Literal["keep", "retire"] = "keep"
    """After a refused merge. keep: all its trainers continue. retire: only the one with the largest
    request continues."""


class EvalSettings(SettingsGroup):
    """When the loss on held-out text is measured; the seed of the run does not change the rows."""

    every_rounds: Count = 1
    """Rounds from one evaluation to the next."""
    num_sequences: Count = 64
    """Upper limit of the held-out rows of a reported loss."""
    sample_tokens: Number = 0
    """Tokens with which each evaluation continues a held-out text, to read how the model writes."""


class CheckpointSettings(SettingsGroup):
    """When the whole state is saved; also at the end, at a signal, and after learners' round 1."""

    every_rounds: Count | None = None
    """Rounds from one save to the next. Unset: only every_s decides."""
    every_s: Amount = 300.0
    """Seconds from one save to the next; each waits for a round's end."""
    keep: Count = 2
    """Newest checkpoints to keep, beside the one with the lowest loss."""
    watchdog_s: Positive | None = None
    """Seconds without a new round after which the process prints its stacks and ends. Choose more
    than a round takes with compilation, evaluation and save. Unset: never."""


class EngineSettings(SettingsGroup):
    """Where workers run: in this process, or in learner processes that may come and go."""

    kind: Name = "local"
    """local: in this process. direct: in learners that reach this computer with a ticket. bucket:
    in learners anywhere that share a bucket. ray: in processes of a Ray cluster; needs the extra
    ray. Or one of your own."""
    address: str = ""
    """direct: IP:PORT of this computer for its ticket, beside those it has, such as of a forwarded
    UDP port. bucket: its address, s3://, gs://, az:// or file:///, with a prefix for the run. ray:
    HOST:PORT of a cluster to join; empty: start one on this machine."""
    relay: str = ""
    """direct: relay for computers that cannot reach each other. Empty: the public ones of iroh,
    which are shared and slow; off: none; or the https:// address of your own."""
    members: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """direct: ids of the learners that are let in, which terminals say. Empty: whoever has the
    ticket."""
    trains_here: Annotated[bool | None, AUTO] = None
    """direct, bucket: start a learner on this computer too, with its accelerator. auto: for
    direct."""
    serves_files: Annotated[bool | None, AUTO] = None
    """direct, bucket: give learners the prepared rows, and for an adapter the weights, that they
    lack. auto: for direct."""
    max_learners: Count | None = None
    """Largest number of learners. Unset: one for each worker at the start of the run."""
    quorum: Count | None = None
    """Number of a trainer's learners whose results suffice to end its round. Unset: all."""
    grace_s: Amount = 5.0
    """Seconds to wait for other learners after the quorum is reached."""
    heartbeat_s: Positive = 20.0
    """Seconds without a heartbeat after which a learner is lost."""
    restart_s: Positive = 120.0
    """Seconds to wait for a learner to start; then others take over its workers."""
    link: Link = ""
    """direct, bucket: hold each process's transfers to a rate in each direction, such as 10Mbit/s,
    to see how a slow link would do. Empty: no limit."""
    steps: Annotated[Literal["equal", "by_speed"], "accepted"] = "by_speed"
    """by_speed: slower learners make fewer updates in a round (arXiv 2401.09135)."""

    @property
    def starts_learner(self) -> bool:
        """Whether the driver starts a learner on its own computer."""
        if self.trains_here is None:
            return self.kind == "direct"
        return self.trains_here

    @property
    def serves(self) -> bool:
        """Whether the driver gives learners the files that they lack."""
        if self.serves_files is None:
            return self.kind == "direct"
        return self.serves_files

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about learners: keys, and what to do."""
        fields = type(self).model_fields.items()
        changed = [name for name, field in fields if getattr(self, name) != field.default]
        if self.kind == "local" and changed:  # `kind` has its default, and is not in `changed`
            need = "this engine has no learners; set the first to direct, or unset the rest"
            yield " ".join(["kind", *changed]), need
        if self.kind == "bucket" and "://" not in self.address:
            need = "a bucket has an address: s3://BUCKET/RUN, or of a folder file:///FOLDER; set it"
            yield "kind address", need
        if self.kind == "ray" and self.link:
            yield "kind link", "only transfers of direct and bucket are held; unset the second"
        if self.kind != "direct" and (self.relay or self.members):
            yield "kind relay members", "only direct has these; set it, or unset the others"
        if self.kind == "direct" and self.relay not in ("", "off"):
            if not self.relay.startswith(("https://", "http://")):
                yield (
                    "relay",
                    "is no relay; write off or an https:// address, or leave it empty",
                )
        if self.kind == "ray" and (self.trains_here or self.serves_files):
            yield "kind trains_here serves_files", "ray does this itself; unset the others"
        if self.quorum and self.max_learners and self.quorum > self.max_learners:
            yield "quorum max_learners", "there are not as many learners; lower the first"


class LogSettings(SettingsGroup):
    """What the terminal and trackers show; see `adloco_jax.run.watching.loggers`."""

    every_rounds: Count = 1
    """Rounds from one line on the terminal to the next."""
    every_updates: Count | None = None
    """Updates from one training loss in the ledger to the next. Unset: ten a round."""
    tensorboard: bool = False
    """Write tensorboard/ in the run's folder; needs the extra tensorboard."""
    wandb: bool = False
    """Send metrics to Weights & Biases; needs the extra wandb."""


class Config(SettingsGroup):
    """A config as written, checked: plain Python values; an option that is unset is None.

    `config.completed` makes `Settings` of it.
    """

    model: Annotated[ModelSettings, "refused"]
    # Earlier versions had no such group, and their ledgers are read, too.
    adapter: Annotated[AdapterSettings, "refused"] = AdapterSettings()
    data: Annotated[DataSettings, "refused"]
    ensemble: Annotated[EnsembleSettings, "refused"]
    inner: Annotated[InnerSettings, "accepted"]
    outer: Annotated[OuterSettings, "accepted"]
    batching: Annotated[BatchingSettings, "accepted"]
    switch: Annotated[SwitchSettings, "accepted"]
    merge: Annotated[MergeSettings, "accepted"]
    eval: Annotated[EvalSettings, "harmless"]
    checkpoint: Annotated[CheckpointSettings, "harmless"]
    log: Annotated[LogSettings, "harmless"]
    engine: Annotated[EngineSettings, "harmless"]
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), "refused"] = 0
    """Random seed of the parameters, the data order, and the keys of a loss."""
    num_rounds: Annotated[Count | None, "harmless"] = None
    """Outer steps after which the run ends. Unset: 20 (AdLoCo table A.2), unless num_tokens or
    num_epochs is set."""
    num_tokens: Annotated[int | None, Field(ge=1, le=4 * 10**18), "harmless"] = None
    """Number of tokens, of all trainers together, after which the run ends. With num_rounds set
    too, the first to come ends it, and learning-rate schedules end with it."""
    num_epochs: Annotated[Positive | None, "harmless"] = None
    """Passes over the training rows, of all trainers together, after which the run ends, unless
    num_rounds or num_tokens ends it before. Rounds of a fixed length then divide a pass evenly."""
    # Not an option: the rows that trainers draw from, once they are read; 0: not yet.
    num_rows: Annotated[Number, RECORDED] = 0

    @property
    def unset(self) -> set[str]:
        """The options of all groups that are still to be found by `config.completed`."""
        return {f"{name}.{key}" for name in GROUPS for key in getattr(self, name).unset}

    @property
    def last_round(self) -> float:
        """The round after which the run ends at the latest; infinite if only tokens end it."""
        if self.num_rounds:
            return self.num_rounds
        if self.num_tokens or self.num_epochs:
            return math.inf
        return 20  # AdLoCo table A.2

    @property
    def round_tokens(self) -> int:
        """Tokens of the first round, of all workers together."""
        sequences = self.batching.initial_batch_size * sum(self.ensemble.sizes())
        return self.inner.steps_per_round * sequences * self.data.sequence_length

    @property
    def last_token(self) -> float:
        """The tokens after which the run ends at the latest; infinite if only rounds end it."""
        last = math.inf
        if self.num_tokens:
            last = self.num_tokens
        if self.num_epochs and self.num_rows:  # the rows may not be read yet
            last = min(last, self.num_epochs * self.num_rows * self.data.sequence_length)
        return last

    def share_done(self, rounds: int, tokens: int) -> float:
        """Return the fraction of the run that is done: of rounds or of tokens, the larger."""
        return max(rounds / self.last_round, tokens / self.last_token)

    def flat(self) -> dict[str, Any]:
        """Return all settings in one dict by dotted key, such as `inner.tx`; tuples are lists.

        Options of no group, such as `seed`, come first.
        """
        flat = {}
        of_groups = {}
        for name, value in self.model_dump(mode="json").items():
            if name not in GROUPS:
                flat[name] = value
                continue
            for key, option in value.items():
                of_groups[f"{name}.{key}"] = option
        return flat | of_groups

    def with_rows(self, num_rows: int) -> Self:
        """Return settings with the number of rows of a pass; num_epochs may shorten their rounds.

        With num_epochs, a pass then has the fewest rounds of at most steps_per_round updates, all
        of one length. So a run with more passes has the same rounds. Rounds stay as they are if
        their length is not fixed, or parameters are sent in parts. Called again with the same rows,
        it changes nothing.
        """
        inner = self.inner
        known = self.model_copy(update={"num_rows": num_rows})
        is_fixed = inner.max_steps_per_round is None and inner.round_length == "fixed"
        # With `own_params` parameters are sent in parts, within a round.
        if not self.num_epochs or not num_rows or not is_fixed or self.outer.own_params:
            return known
        at_once = self.batching.initial_batch_size * sum(self.ensemble.sizes())  # rows of an update
        # Updates of a pass, or of the part of it that the run makes; the rounds of these; and the
        # updates of such a round.
        updates = max(math.ceil(min(self.num_epochs, 1.0) * num_rows / at_once), 1)
        rounds = math.ceil(updates / inner.steps_per_round)
        steps = math.ceil(updates / rounds)
        return known.model_copy(
            update={"inner": inner.model_copy(update={"steps_per_round": steps})}
        )

    def broken_rules(self, tables: Tables) -> Iterator[Rule]:
        """Yield the broken rules about options of several groups; their keys name the group."""
        inner = self.inner
        outer = self.outer
        workers = self.ensemble
        source = tables["DATA_SOURCES"][self.data.source]
        has_columns = "text_column" in source.needs  # `needs`: what must not be empty
        architecture = tables["ARCHITECTURES"][self.model.arch]
        is_labelled = architecture.data == "labelled"  # whether each row has a class
        # Whether the batch-size test measures gradients; others are schedules.
        is_measured = tables["BATCH_TESTS"][self.batching.test].needs != "nothing"
        # Whether workers may join after the start: at a set time, or as gradient noise grows.
        joins = workers.spawn_frac or (is_measured and "workers" in self.batching.growth)
        is_fixed = inner.max_steps_per_round is None and inner.round_length == "fixed"
        # Whether the function that builds the network takes an adapter.
        can_adapt = "adapter" in inspect.signature(architecture.build).parameters

        if self.adapter.rank and not can_adapt:
            yield "adapter.rank model.arch", "it can have no adapter; set the first to 0"
        elif self.adapter.rank and not self.model.init_from:
            yield "adapter.rank model.init_from", "no weights to adapt; set the second"
        if self.model.base_dtype in ("int8", "nf4") and not self.adapter.rank:
            need = "only frozen weights beside an adapter can be quantised; set the second to 16"
            if not self.model.init_from:
                need = "random weights cannot be quantised; set adapter.rank and model.init_from"
            yield "model.base_dtype adapter.rank", need
        if self.data.sequence_length > self.model.max_length:
            need = f"rows exceed the context; set data.sequence_length={self.model.max_length}"
            yield "data.sequence_length model.max_length", need
        if is_labelled and self.eval.sample_tokens:
            yield "model.arch eval.sample_tokens", "a classifier writes no text; set tokens to 0"
        if self.eval.sample_tokens >= self.model.max_length:
            yield "eval.sample_tokens model.max_length", "no room is left for a text; lower it"
        if is_labelled and not has_columns:
            yield "model.arch data.source", "rows need labels; set the second to jsonl, parquet, hf"
        if self.data.separates_documents and not architecture.separates_documents:
            key = "text_column" if self.data.is_chat else "attention"
            yield f"model.arch data.{key}", "it separates no documents or chats; unset the second"
        if is_labelled and self.data.sequence_length < 3:
            yield "model.arch data.sequence_length", "two tokens frame a text; set at least 3"

        if workers.initial_workers and not joins:
            keys = "ensemble.initial_workers ensemble.spawn_frac batching.test batching.growth"
            yield keys, "the others never join; set spawn_frac, or a measuring test and growth"
        if inner.warmup_updates >= self.last_round * inner.steps_per_round:
            need = "the warm-up would outlast the run's updates; shorten it"
            yield "inner.warmup_updates num_rounds inner.steps_per_round", need
        if inner.schedule != "constant" and math.isfinite(self.last_round) and not is_fixed:
            keys = "inner.schedule num_rounds num_tokens inner.max_steps_per_round"
            need = "rounds that grow have no planned end; set only num_tokens, or a constant rate"
            yield f"{keys} inner.round_length", need

        if outer.own_params and (outer.skip_single or self.engine.kind != "local"):
            keys = "outer.fragments outer.delay_updates outer.skip_single engine.kind"
            yield keys, "the last two need whole rounds; set one fragment and no delay"
        is_changed = outer.clip_workers != OPTIONS["outer.clip_workers"].default
        if is_changed and self.engine.kind == "local":
            need = (
                "this engine has no learners; set the second to ray or bucket, or unset the first"
            )
            yield "outer.clip_workers engine.kind", need
        if inner.steps_per_round % outer.fragments:
            yield "outer.fragments inner.steps_per_round", "must divide the second; change one"
        if outer.delay_updates * outer.fragments >= inner.steps_per_round:
            need = "a fragment must arrive before the next leaves; keep delay * fragments lower"
            yield "outer.delay_updates outer.fragments inner.steps_per_round", need


class Settings(Config):
    """The complete settings of a run: what the config leaves unset was found (`config.completed`).

    An option that is None is off, or has no limit.
    """


# The groups of options, by name, such as "inner".
GROUPS: dict[str, Any] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup)
}


def _options() -> dict[str, FieldInfo]:
    """Collect the options by key, those of no group first, without fields that are no options."""
    options = {}
    for name, field in Settings.model_fields.items():
        if name not in GROUPS and RECORDED not in field.metadata:
            options[name] = field
    for group, model in GROUPS.items():
        for name, field in model.model_fields.items():
            if RECORDED not in field.metadata:
                options[f"{group}.{name}"] = field
    return options


def _marked(kind: type) -> dict[str, Any]:
    """Collect the annotations of a class, `Entry` or `Found`, by the keys of their options."""
    marks = {}
    for key, field in OPTIONS.items():
        for mark in field.metadata:
            if isinstance(mark, kind):
                marks[key] = mark
    return marks


# By key, such as "inner.tx": the options, those that name an entry of a table, and those that
# `config.completed` finds. The last are the sizes of a model, without their group.
OPTIONS: dict[str, FieldInfo] = _options()
ENTRIES: dict[str, Entry] = _marked(Entry)
FOUND: dict[str, Found] = _marked(Found)
SIZES = [key.removeprefix("model.") for key, mark in FOUND.items() if mark == _SIZE]


def bytes_per_s(link: str) -> float:
    """Return what a link such as "10Mbit/s" carries besides headers of packets; infinity for ""."""
    if not link:
        return math.inf
    number_and_unit = link.removesuffix("bit/s")  # such as "10M"
    unit = {"k": 1e3, "M": 1e6, "G": 1e9}[number_and_unit[-1]]
    bits_per_s = int(number_and_unit[:-1]) * unit
    return 0.95 * bits_per_s / 8  # headers take about a twentieth; a byte has 8 bits


def kind_of_change(key: str) -> Change:
    """Return what another value of an option means for a run that is resumed.

    The field's annotation says so, else that of its group.
    """
    group, _, _ = key.partition(".")  # of an option of no group, such as "seed", its own name
    marks = [*OPTIONS[key].metadata, *Settings.model_fields[group].metadata]
    return next(mark for mark in marks if mark in get_args(Change))


def default_of(key: str) -> Any:
    """Return the value of an option in `default_config()`: "auto" or None if it is unset there."""
    field = OPTIONS[key]
    if AUTO in field.metadata:
        return "auto"
    if key in FOUND:
        return None
    return field.default


def meaning(key: str) -> str:
    """Return the text below an option, such as `inner.tx`, on one line."""
    return " ".join((OPTIONS[key].description or "").split())
