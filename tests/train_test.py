"""Whole runs of the toy: their records, refusals and repetitions."""

import dataclasses
import re
import threading
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.flax import load_file
from toy import bigram_loss, corpus, init_fn, settings_of
from toy_runs import GROWING, assert_same_end, events, run

from adloco_jax import training
from adloco_jax.data.sampling import split_heldout
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import ProgramKey
from adloco_jax.errors import ConfigError, DataError, ResourceError
from adloco_jax.host import processes
from adloco_jax.run import attempts
from adloco_jax.run.kept.folder import check_workdir
from adloco_jax.study import summary

pytestmark = pytest.mark.usefixtures("one_device")


FOUR = {"num_trainers": 1, "num_workers": 4}


ONE = {"num_trainers": 1, "num_workers": 1}

# the batch is as large as fits
FULL = {"test": "constant", "initial_batch_size": 4, "max_batch_size": 4}
APART = {"policy": "none"}


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    """A run that grows, accumulates and merges until one trainer is left."""
    return run(tmp_path_factory.mktemp("growing") / "r", settings_of(**GROWING))


def test_the_ledger_records_growth_accumulation_and_merge(growing):
    (start,), (end,) = (events(growing.workdir, name) for name in ("start", "end"))
    assert len({*start["heldout_rows"]} | {*start["guard_rows"]}) == 8 + 8
    assert start["config"]["batching"]["buckets"] == [2, 4] and start["num_params"] == 36
    rounds, merges = (events(growing.workdir, name) for name in ("round", "merge"))
    for cost in ("tokens", "updates", "syncs", "bytes"):
        assert end[f"{cost}_total"] == sum(e.get(cost, 0) for e in [*rounds, *merges])
    evals = events(growing.workdir, "eval", trainer="consensus")
    assert [e["round"] for e in evals] == [2, 4, 6, 7]
    assert evals[-1]["loss"] == growing.loss < evals[0]["loss"]
    assert evals[-1]["perplexity"] == pytest.approx(np.exp(growing.loss))
    seconds = {line["round"]: line["step_s"] - line["stall_s"] for line in rounds}
    rate = end["tokens_total"] / sum(seconds.values())
    assert end["tokens_per_s"] == pytest.approx(rate, rel=0.01)


def test_a_reported_loss_is_the_token_mean_of_the_consensus(growing):
    logits = np.asarray(growing.params["w"], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = split_heldout(
        corpus().heldout_rows, num_sequences=8, batch_size=4, num_trainers=3
    ).report_rows
    losses = -log_probs[rows[:, :-1], rows[:, 1:]]
    assert growing.loss == pytest.approx(losses.mean(), rel=1e-5)


def test_held_out_rows_are_split_into_those_that_decide_and_those_reported():
    def split(count, **options):
        # a quarter of the rows belong to the second class
        rows = np.arange(count)[:, None] % 4 // 3
        parts = split_heldout(rows, num_sequences=64, batch_size=4, **options)
        return len(parts.guard_rows), len(parts.report_rows)

    assert split(20, num_trainers=2) == (10, 10)
    assert split(20) == (0, 20) and split(1) == (0, 1)  # one trainer: nothing is decided
    parts = split_heldout(np.arange(20)[:, None], num_sequences=64, batch_size=4, num_trainers=2)
    assert sorted(np.concatenate([parts.guard_rows, parts.report_rows])[:, 0]) == list(range(20))
    assert sorted([*parts.guard_E, *parts.report_E]) == list(range(20))
    one, two = (
        split_heldout(np.arange(96)[:, None], num_sequences=64, batch_size=4, num_trainers=m)
        for m in (1, 2)
    )
    assert (one.report_E == two.report_E).all()  # losses of one trainer and of two compare
    for count, trainers, need in ((0, 1, 1), (0, 3, 2), (1, 3, 2)):
        with pytest.raises(DataError, match=f"corpus.heldout_rows: have {count}, need {need}, "):
            split(count, num_trainers=trainers)
    assert split(4, num_classes=2, num_trainers=2) == (2, 2)


def test_fit_refuses_wrong_arguments_by_name(tmp_path):
    for wrong, expected in (
        (dict(settings=3), "config = 3: must be a config; start from default_config"),
        (dict(corpus=object()), "corpus: an object without heldout_rows, fingerprint, sha"),
        (
            dict(corpus=dataclasses.replace(corpus(), rows=np.zeros((32, 9)))),
            r"corpus.heldout_rows: float64 of shape \(16, 9\); give an array of integers",
        ),
        (
            dict(corpus=dataclasses.replace(corpus(), rows=[[1] * 9] * 32)),
            r"corpus.heldout_rows: list of shape \(16, 9\); give an array of integers",
        ),
        (dict(inner_tx=0.1), "inner_tx: a float; give a transformation, such as optax.adamw"),
        (
            dict(inner_tx=optax.chain(optax.sgd(1.0), optax.add_noise(0.1, 0.1, 0))),
            "inner_tx: its state.*rng_key: a PRNG key, which cannot be saved",
        ),
        (
            dict(outer_tx=optax.scale(1.0)._replace(init=lambda params: NOTHING)),
            "outer_tx: its state.*: an array of size zero",
        ),
        (
            dict(outer_tx=optax.scale(1.0)._replace(update=lambda g, state, _: (g, (state, 1)))),
            "outer_tx: an update changes the structure of its state",
        ),
        (dict(init_fn=None), "init_fn: params: .* at least one floating-point array"),
        (
            dict(init_fn=None, params={"w": jnp.zeros(3), "f": jnp.tanh}),
            r"params: .*'f'.* its leaves must all be arrays",
        ),
        (
            dict(init_fn=lambda key: {"batch_stats": jnp.zeros(3)}),
            r"init_fn: params\['batch_stats'\]: state that the model changes",
        ),
        *(
            (dict(init_fn=lambda key, tree=tree: tree), "init_fn: ")
            for tree in ({"w": W, "e": NOTHING}, {"w": W, "k": KEY}, {"a.b": W, "a": {"b": W}})
        ),
        (dict(init_fn=3), "init_fn: TypeError: Expected a callable value, got 3"),
        (
            dict(init_fn=lambda key: {"w": key["no"]}),
            r"init_fn: \w+: .* \(.*train_test.py, line \d+\)",
        ),
        (
            dict(loss_fn=lambda params, rows: (bigram_loss(params, rows), {})),
            r"loss_fn: returned \('float32\[\]', \{\}\); return one number, the mean",
        ),
        (
            dict(loss_fn=lambda params, rows: params["no"]),
            r"^loss_fn: KeyError: 'no' \(.*train_test.py, line \d+\)$",
        ),
        (dict(eval_loss_fn=lambda params, rows: rows), r"eval_loss_fn: returned int32\[2, 9\]; "),
        (
            dict(settings=settings_of(inner={"tx": "muon"})),
            r"^label_params: names do not say what w \[6, 6\] is; give label_params",
        ),
        (
            dict(settings=settings_of(inner={"tx": "muon"}), label_params=lambda params: {}),
            "^label_params: its tree differs from the parameters'",
        ),
        (
            dict(
                settings=settings_of(inner={"tx": "muon"}),
                label_params=lambda params: {"w": "stacked_matrix"},
            ),
            r"^label_params: w \[6, 6\]: has 'stacked_matrix'; need matrix \(two axes\)",
        ),
    ):
        given = {"settings": settings_of(), "workdir": tmp_path / "r"} | wrong
        with pytest.raises(ConfigError, match=expected) as refused:
            run(**given)
        assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_muon_trains_what_fit_labels_as_matrices_and_the_header_says_so(tmp_path, capsys):
    """Equal parameters in a sum get equal updates, unless one is Muon's and the other AdamW's."""
    settings = settings_of(num_rounds=1, ensemble=ONE, inner={"tx": "muon"}, batching=FULL)
    own = {
        "init_fn": lambda key: {"v": W, "w_1": W, "w_2": W},
        "loss_fn": lambda params, rows: bigram_loss({"w": sum(params.values())}, rows),
        "label_params": lambda _: {"v": "embedding", "w_1": "matrix", "w_2": "matrix"},
    }
    result = run(tmp_path / "r", settings, **own)
    said = "parameters by label; adamw (embedding): v; muon: w_*"
    assert said in capsys.readouterr().out.splitlines()
    np.testing.assert_array_equal(result.params["w_1"], result.params["w_2"])
    assert not np.allclose(result.params["w_1"], result.params["v"])


def test_a_run_says_that_its_optimizer_and_rows_are_its_callers(tmp_path, capsys):
    default = {"learning_rate": 0.0004}
    settings = settings_of(num_rounds=1, ensemble=ONE, inner=default, batching=FULL)
    result = run(tmp_path / "r", settings, inner_tx=optax.lion(1e-3), loss_unit=None)
    said = capsys.readouterr().out
    assert "updates (own optimizer) and a synchronisation (nesterov)" in said
    assert " of own rows per worker and update" in said and ", own model; " in said
    (start,) = events(result.workdir, "start")
    assert start["own"] == ["model", "rows", "inner_tx"]
    assert_unit_and_perplexity(result.workdir, "")


def assert_unit_and_perplexity(workdir, unit):
    """A loss has a perplexity only where it is in nats per token."""
    is_text = unit == "nats/token"
    line = events(workdir, "eval", trainer="consensus")[-1]
    assert ("perplexity" in line) == is_text
    (start,) = events(workdir, "start")
    assert start["loss_unit"] == unit
    table = summary.closing_table(workdir)
    (shown,) = re.findall(r"^held-out loss +[\d.]+(.*?), .* after round", table, re.MULTILINE)
    assert shown.strip() == unit and ("\nperplexity " in table) == is_text
    page = (workdir / "report" / "index.html").read_text()
    assert ("nats/token" in page) == is_text


def test_a_loss_in_nats_per_token_has_a_perplexity(growing):
    assert_unit_and_perplexity(growing.workdir, "nats/token")


class Pair(NamedTuple):
    w: jax.Array
    b: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A pytree node of its own type that contains a function, like Equinox's modules."""

    w: jax.Array
    act: Callable = dataclasses.field(metadata={"static": True}, default=jnp.tanh)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((6, 6)))
        self.drop = nnx.Dropout(0.1, rngs=rngs)


GRAPH, _, REST = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
W, KEY, NOTHING = jnp.zeros((6, 6)), jax.random.key(0), jnp.zeros((0, 3))
# Trees that `fit` accepts, and the array of each that the toy's loss takes.
TREES = {
    "odd/name c.\u00e9": ([Pair(W, None), jnp.zeros(3)], lambda p: p[0].w),
    "empty": ({"more": {}, "w": W}, lambda p: p["w"]),
    "nnx": (nnx.state(Net(nnx.Rngs(0)), nnx.Param), lambda p: nnx.merge(GRAPH, p, REST).w[...]),
    "module": (Module(W), lambda p: p.w),
    "bfloat16": (W.astype(jnp.bfloat16), lambda p: p.astype(jnp.float32)),
}
# One program for the steps: batches do not grow.
SHORT = {"batching": {"batch_cap": 2}, "merge": APART}


def test_trees_that_fit_accepts_are_saved_resumed_and_exported(tmp_path):
    """One run trains all trees, by the sum of their losses: each as if it were alone."""

    def sum_of_losses(params, rows):
        return sum(bigram_loss({"w": w_of(params[key])}, rows) for key, (_, w_of) in TREES.items())

    trees = {key: tree for key, (tree, _) in TREES.items()}
    own = {"init_fn": lambda key: trees, "loss_fn": sum_of_losses}
    alone = {"init_fn": lambda key: W, "loss_fn": lambda w, rows: bigram_loss({"w": w}, rows)}
    first, both = (settings_of(num_rounds=rounds, ensemble=ONE, **SHORT) for rounds in (1, 2))
    run(tmp_path / "r", first, **own)
    result = run(tmp_path / "r", both, **own)
    expected = run(tmp_path / "alone", both, **alone)  # an array is a tree, too
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, 1]
    assert jax.tree.structure(result.params) == jax.tree.structure(trees)
    assert result.loss == pytest.approx(len(trees) * expected.loss, rel=1e-3)
    exported = load_file(tmp_path / "r" / "export" / "params.safetensors")
    for key, (_, w_of) in TREES.items():
        trained = w_of(result.params[key])
        atol = 1e-2 if key == "bfloat16" else 1e-6
        np.testing.assert_allclose(trained, expected.params, rtol=1e-4, atol=atol)
        assert any(np.array_equal(leaf.astype(np.float32), trained) for leaf in exported.values())


def two_valleys(params, tokens):
    """A loss with minima at x = -1 and 1; the first id of a row says which one is lower."""
    side = jnp.mean(jnp.where(tokens[:, 0] == 0, 1.0, -1.0))
    x = params["x"]
    return bigram_loss(params, tokens) + 0.1 * (x**2 - 1) ** 2 + 0.01 * side * x


class Sided(type(corpus())):
    """The toy's rows, each with the trainer's id at its start."""

    def batch(self, trainer, stream, start, count):
        rows = super().batch(trainer, stream, start, count)
        rows[:, 0] = trainer
        return rows


def test_a_merge_that_raises_the_loss_too_much_is_refused(tmp_path):
    def central(key):
        return init_fn(key) | {"x": jnp.zeros(())}

    settings = settings_of(
        num_rounds=3,
        ensemble={"num_trainers": 2, "num_workers": 3},
        inner={"steps_per_round": 20},
        batching={"test": "constant"},
        merge={"every_rounds": 2, "max_barrier": 0.01, "on_refusal": "retire"},
    )
    result = run(
        tmp_path / "r", settings, corpus=Sided(corpus().rows), init_fn=central, loss_fn=two_valleys
    )
    (refusal,) = events(tmp_path / "r", "refusal")
    assert refusal["barrier"] > 0.01 and refusal["action"] == "retire"
    assert events(tmp_path / "r", "merge") == []
    # The refused merge sent parameters without momentum; a worker is handed over.
    assert (refusal["syncs"], refusal["bytes"]) == (1, 37 * 4 * (1 + 3))
    for cost in ("bytes", "syncs"):
        moved = sum(e[cost] for e in events(tmp_path / "r", "round"))
        assert getattr(result.state.control, f"{cost}_total") == moved + refusal[cost]
    assert result.ensemble.num_trainers == 1
    # No trainer was averaged: x is still in its valley.
    np.testing.assert_allclose(np.abs(result.ensemble.params_M["x"]), 1.0, atol=0.3)


class Exhausted:
    """A device that runs out of memory above a micro-batch, from a given call on."""

    def __init__(self, monkeypatch, largest, from_call=1):
        real, self.calls = Programs.__getitem__, 0

        def program(programs, key):
            compiled = real(programs, key)
            if key.kind == "steps" and key.micro_batch_size > largest:
                self.calls += 1
                if self.calls >= from_call:
                    return self.failing(compiled)
            return compiled

        monkeypatch.setattr(Programs, "__getitem__", program)

    @staticmethod
    def failing(compiled):
        class Failing:
            input_shardings = compiled.input_shardings

            def __call__(self, *arguments):
                compiled(*arguments)  # the buffers are donated, as on a device that fails late
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory (a fake)")

        return Failing()


def plans_of(workdir):
    names = ("round", "micro_batch_size", "num_accum_steps")
    return [tuple(e[name] for name in names) for e in events(workdir, "round", trainer=0)]


def test_out_of_memory_goes_back_to_the_newest_checkpoint_with_half_the_micro_batch(
    tmp_path, monkeypatch
):
    """The run then equals one that resumes with that size."""
    each = {"every_rounds": 1}
    batching = FULL | {"test": "ramp", "ramp": ((0, 2), (1, 4)), "initial_batch_size": 2}
    settings = settings_of(num_rounds=5, batching=batching, checkpoint=each, eval=each)
    with monkeypatch.context() as patch:
        Exhausted(patch, largest=2, from_call=5)  # a call of four workers, in the third round
        halved = run(tmp_path / "r", settings)
    (fault,) = events(tmp_path / "r", "fault")
    assert (fault["kind"], fault["round"]) == ("out_of_memory", 3)
    assert (fault["max_batch_size_before"], fault["max_batch_size"]) == (4, 2)
    assert "batches may differ" in fault["effect"]
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, 2]
    assert plans_of(tmp_path / "r") == [(1, 2, 1), (2, 4, 1), (3, 2, 1), (4, 2, 1), (5, 2, 1)]
    assert halved.state.control.max_batch_size == 2  # as in the checkpoint
    run(tmp_path / "resumed", settings.model_copy(update={"num_rounds": 2}))
    smaller = settings.batching.model_copy(update={"max_batch_size": 2})
    resumed = run(
        tmp_path / "resumed",
        settings.model_copy(update={"batching": smaller}),
        accept_config_change=True,
    )
    assert_same_end(halved, resumed)


def test_out_of_memory_before_the_first_checkpoint_begins_again(tmp_path, monkeypatch):
    Exhausted(monkeypatch, largest=2, from_call=3)
    run(tmp_path / "r", settings_of(num_rounds=4, ensemble=ONE, batching=FULL))
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, 0]
    assert plans_of(tmp_path / "r") == [(index, 2, 1) for index in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("first", "from_call", "wanted"),
    [
        (2, 5, "process 1 failed .*set batching.max_batch_size to 2 .*checkpoints/2"),
        (4, 9, "out of memory at a micro-batch of 4: .*use fewer workers"),  # a rule's least
    ],
)
def test_of_several_processes_all_end_and_the_size_to_set_is_named(
    tmp_path, monkeypatch, first, from_call, wanted
):
    two = types.SimpleNamespace(process_count=lambda: 2, process_index=lambda: 1, errors=jax.errors)
    real, told = attempts.after_failure, []

    def as_one_of_two(*failure):
        with monkeypatch.context() as patch:
            patch.setattr(attempts, "jax", two)
            patch.setattr(processes, "end_others", told.append)
            return real(*failure)

    Exhausted(monkeypatch, largest=2, from_call=from_call)
    monkeypatch.setattr(training, "after_failure", as_one_of_two)
    rises = {"test": "ramp", "ramp": ((0, first), (1, 4)), "initial_batch_size": first}
    settings = settings_of(batching=FULL | rises, checkpoint={"every_rounds": 1})
    with pytest.raises(ResourceError, match=f"round 3: {wanted}") as failed:
        run(tmp_path / "r", settings)
    assert len(told) == 1 and str(failed.value).startswith(told[0])


def test_out_of_memory_with_one_sequence_ends_the_run(tmp_path, monkeypatch):
    Exhausted(monkeypatch, largest=0)
    with pytest.raises(ResourceError, match="RESOURCE_EXHAUSTED"):
        run(tmp_path / "r", settings_of(num_rounds=2))
    faults = events(tmp_path / "r", "fault")
    assert [f["max_batch_size"] for f in faults] == [2, 1]


def test_a_run_compiles_a_bounded_set_of_programs(growing):
    keys = [e["key"].split() for e in events(growing.workdir, "compile")]
    shapes = {tuple(key[1:3]) for key in keys if key[0] != "loss"}
    for shape in shapes:
        kinds = [key[0] for key in keys if tuple(key[1:3]) == shape]
        assert kinds.count("stats") <= 1 and kinds.count("outer") <= 1
        assert kinds.count("start") <= 2  # with and without accumulation
        assert kinds.count("steps") <= len((2, 4)) + 1
    assert [key[0] for key in keys].count("loss") == 1
    assert len(keys) == len(set(map(tuple, keys)))
    assert "background" in {e["where"] for e in events(growing.workdir, "compile")}
    assert events(growing.workdir, "round")[0]["stall_s"] > 0


def test_a_program_still_in_the_queue_is_compiled_by_who_needs_it(monkeypatch):
    begun, needed, compiled = threading.Event(), threading.Event(), []

    def compile_slowly(programs, key, *, background):
        compiled.append((key.kind, background, programs.compiling))
        if key.kind == "stats":
            begun.set()
            assert needed.wait(60)
        return key.kind

    monkeypatch.setattr(Programs, "_compile", compile_slowly)
    programs = Programs(None)
    programs.prefetch([ProgramKey("stats"), ProgramKey("start")])
    assert begun.wait(60)
    assert programs[ProgramKey("start")] == "start"
    needed.set()
    assert programs[ProgramKey("stats")] == "stats"
    programs.close()
    assert compiled == [("stats", True, False), ("start", False, True)]
    assert not programs.compiling


def test_few_programs_are_in_flight_and_donated_results_are_not_waited_for(monkeypatch):
    """XLA's CPU client deadlocks at 32 programs in flight on several devices."""
    waited = []

    class Result:
        def __init__(self, number):
            self.number = number

        def is_deleted(self):
            return self.number % 3 == 0

        def block_until_ready(self):
            waited.append(self.number)
            # the reader of the result gets the error
            raise jax.errors.JaxRuntimeError("out of memory")

    def program(number):
        return "first", Result(number)

    program.input_shardings = ((None,), {})  # of positional arguments, and of keywords
    monkeypatch.setattr(Programs, "_compile", lambda *_, **__: program)
    programs = Programs(None)
    for number in range(20):
        programs.call(ProgramKey("steps"), number)
    programs.close()
    assert waited == [number for number in range(20 - 8) if number % 3]


def test_a_folder_that_cannot_be_a_runs_is_refused(tmp_path):
    (tmp_path / "link" / "run").mkdir(parents=True)
    (tmp_path / "link" / "run" / "checkpoints").symlink_to(tmp_path)
    for name, message in (
        ("x" * 5000, "workdir"),
        ("nul\0", "workdir"),
        ("link/run", "checkpoints is a symbolic link"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_workdir(tmp_path / name)


def test_a_model_in_float64_stays_so_through_accumulation_a_merge_and_a_resume(tmp_path):
    """float64 is enabled in a context, which the compiling thread does not inherit."""
    settings = settings_of(
        num_rounds=3,
        ensemble={"num_trainers": 2, "num_workers": 2},
        batching={"test": "ramp", "ramp": ((0, 4), (1, 12)), "initial_batch_size": 4},
        merge={"every_rounds": 2},
    )
    with jax.enable_x64(True):
        params = {"w": jnp.zeros((6, 6), jnp.float64)}
        result = run(tmp_path / "r", settings, init_fn=lambda key: params)
        assert run(tmp_path / "r", settings, init_fn=lambda key: params).loss == result.loss
        assert result.params["w"].dtype == result.ensemble.params_M["w"].dtype == jnp.float64
    assert [e["num_accum_steps"] for e in events(tmp_path / "r", "round")] == [1, 1, 3, 3, 3]
    assert result.loss < np.log(6)


def test_adloco_with_one_trainer_and_a_constant_batch_is_diloco_bit_for_bit(tmp_path):
    alone = {"ensemble": FOUR, "batching": {"test": "constant"}}
    adloco = run(tmp_path / "adloco", settings_of(**alone))
    diloco = run(tmp_path / "diloco", settings_of(**alone | {"merge": APART}))
    assert adloco.state.control == diloco.state.control
    jax.tree.map(np.testing.assert_array_equal, adloco.ensemble, diloco.ensemble)
