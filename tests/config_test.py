import ast
import copy
import inspect
import json
import operator
import runpy
import typing
from pathlib import Path

import ml_collections
import pytest

from adloco_jax import AGGREGATORS, ROUND_LENGTHS
from adloco_jax import settings as settings_module
from adloco_jax.config import completed, default_config, plain_type, tables, validate
from adloco_jax.errors import ConfigError, UserError
from adloco_jax.settings import OPTIONS, default_of

DEFAULTS = default_config().to_dict()
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NUMERIC = [key for key in OPTIONS if plain_type(key) in (int, float)]
# Repeated here, so that a test fails if a range in the schema loses its lower end.
ZERO_IS_ALLOWED = """
    adapter.rank data.skip_bad
    checkpoint.every_s engine.grace_s eval.sample_tokens seed model.loss_chunk inner.warmup_updates
    inner.weight_decay inner.beta1 inner.beta2 inner.final_lr_frac outer.momentum
    outer.average outer.delay_updates outer.mixing batching.smoothing merge.max_barrier""".split()
ONE_IS_REFUSED = """
    model.vocab_size model.num_classes model.norm_eps data.heldout_frac inner.beta1 inner.beta2
    inner.final_lr_frac outer.average outer.momentum outer.mixing batching.smoothing
    batching.test_batch_size
    merge.width ensemble.spawn_frac""".split()


def changed(**values) -> dict:
    """The default config as plain dicts, with changes; `inner__tx` stands for inner.tx."""
    config = copy.deepcopy(DEFAULTS)
    for key, value in values.items():
        group, _, name = key.replace("__", ".").rpartition(".")
        (config[group] if group else config)[name] = value
    return config


def faults(config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        completed(validate(config), reads=False)
    return str(caught.value).split("\n")


def load(name: str, monkeypatch) -> ml_collections.ConfigDict:
    monkeypatch.syspath_prepend(str(CONFIGS.parent))
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()


def flat(config) -> dict:
    return {key: operator.attrgetter(key)(config) for key in OPTIONS}


# --- Values ---------------------------------------------------------------------------------


def test_default_config_is_locked_and_complete():
    config = default_config()
    assert config.is_locked and all(config[group].is_locked for group in ("model", "log"))
    assert config.inner.clip_norm is None and config.inner.get_type("clip_norm") is float
    assert config.batching.test_batch_size == "auto"
    assert flat(config).keys() == OPTIONS.keys()


def test_values_are_read_as_their_own_type():
    learning_rate = validate(changed(inner__learning_rate=1)).inner.learning_rate
    assert type(learning_rate) is float and learning_rate == 1.0
    for value, expected in (("auto", None), (16, 16), (8, 8)):
        config = default_config()
        config.batching.test_batch_size = value
        assert validate(config).batching.test_batch_size == expected
    for value in ("Auto", "16", 2.0, True, 7):
        (line,) = faults(changed(batching__test_batch_size=value))
        assert line.startswith("batching.test_batch_size = ")


def test_buckets_are_sorted_or_powers_of_two_and_midpoints_up_to_the_largest():
    for largest, buckets, expected in (
        (1, (), (1,)),
        (3, (), (1, 2, 3)),
        (20, (), (1, 2, 3, 4, 6, 8, 12, 16, 20)),
        (8, (8, 2, 8, 16), (2, 8)),
        (8, (2, 4), (2, 4, 8)),
    ):
        config = changed(batching__max_batch_size=largest, batching__buckets=buckets)
        assert completed(validate(config), reads=False).batching.buckets == expected


# --- One key at a time ----------------------------------------------------------------------


def test_an_unknown_key_is_refused_and_its_neighbour_named_and_a_missing_one_has_its_default():
    lines = faults(changed(**{f"{key}z": 1 for key in OPTIONS}))
    assert set(lines) == {f"{key}z: no such key; did you mean {key}?" for key in OPTIONS}
    nothing = {key.partition(".")[0]: {} for key in OPTIONS if "." in key}
    assert validate(nothing) == validate(DEFAULTS)
    assert faults(changed(learning_rate=1.0)) == [
        "learning_rate: no such key; did you mean inner.learning_rate or outer.learning_rate?"
    ]


def assert_refused(value, keys) -> None:
    """Checks that there is a line for each of the keys if all have this value."""
    lines = faults(changed(**dict.fromkeys(keys, value)))
    assert sorted(line.partition(" = ")[0] for line in lines) == sorted(keys)
    assert all("must " in line for line in lines)


def test_wrong_types_are_refused():
    types = {key: {typing.get_origin(plain_type(key)) or plain_type(key)} for key in OPTIONS}
    for key, allowed in types.items():
        allowed |= {str} & {type(name) for name in typing.get_args(plain_type(key))}
    for value in (object(), [1], {"a": 1}, ml_collections.ConfigDict({"a": 1}), b"x"):
        assert_refused(value, OPTIONS)
    for value, accepting in (
        *((True, {bool}), ("x\ny", {str})),
        *((5, {int, float}), (1.5, {float})),
    ):
        assert_refused(value, [key for key in OPTIONS if not accepting & types[key]])
    assert_refused(None, [key for key in OPTIONS if default_of(key) not in (None, "auto")])


def test_senseless_numbers_are_refused():
    for value in (-1, -1.0, float("nan"), float("inf"), float("-inf"), 2**63, 10**400):
        assert_refused(value, NUMERIC)
    for zero in (0, 0.0):
        assert_refused(zero, [key for key in NUMERIC if key not in ZERO_IS_ALLOWED])
    for one in (1, 1.0):
        assert_refused(one, ONE_IS_REFUSED)


def test_zero_is_allowed_where_it_means_something():
    config = changed(**dict.fromkeys(ZERO_IS_ALLOWED, 0), engine__kind="ray")
    settings = validate(config).flat()
    assert {settings[key] for key in ZERO_IS_ALLOWED} == {0}


def test_members_of_tuples_are_checked():
    for bad in (-1, 1.5, float("nan"), 2**63, True, "1", None, [1]):
        config = changed(batching__buckets=(bad, 16), batching__ramp=((0, 1), (3, bad)))
        starts = [line.partition(" = ")[0] for line in faults(config)]
        assert starts == ["batching.buckets[0]", "batching.ramp[1][1]"]
    lines = faults(json.loads(default_config().to_json()))  # lists in the place of tuples
    tuples = ["batching.growth", "batching.buckets", "batching.ramp", "engine.members"]
    assert [line.split(" = ")[0] for line in lines] == tuples


# --- Contradictions -------------------------------------------------------------------------

BERT = dict(model__arch="bert", data__source="jsonl", data__path="x")
RAMP = dict(batching__test="ramp")
CONTRADICTIONS = {
    "heads": dict(model__width=66),
    "fragments in learners": dict(engine__kind="ray", outer__delay_updates=1),
    "fragments of the few": dict(outer__skip_single=True, outer__fragments=2),
    "no bucket": dict(engine__kind="bucket", engine__address="bucket/run"),
    "quorum": dict(engine__kind="ray", engine__quorum=3, engine__max_learners=2),
    "relays of a bucket": dict(
        engine__kind="bucket", engine__address="s3://b", engine__relay="off"
    ),
    "no relay": dict(engine__kind="direct", engine__relay="relay.example"),
    "a learner beside Ray's": dict(engine__kind="ray", engine__trains_here=True),
    "a link of Ray": dict(engine__kind="ray", engine__link="10Mbit/s"),
    "learners of no engine": dict(engine__steps="equal", engine__restart_s=9.0),
    "rule in fragments": dict(outer__aggregator="own", outer__fragments=2),
    "fragments of adamw": dict(outer__fragments=2, outer__tx="adamw"),
    "kv heads": dict(model__num_kv_heads=3),
    "classes of unlabelled text": dict(model__arch="bert"),
    "an adapter of nothing": dict(adapter__rank=2),
    "four bits without an adapter": dict(model__base_dtype="nf4"),
    "a classifier's adapter": BERT | dict(adapter__rank=2),
    "no room for a text": BERT | dict(data__sequence_length=2),
    "context": dict(data__sequence_length=513),
    "no path": dict(data__source="jsonl"),
    "held-out path of stdlib": dict(data__heldout_path="x.txt"),
    "configuration of a text": dict(data__name="en"),
    "workers": dict(ensemble__num_workers=3),
    "warm-up": dict(num_rounds=2, inner__steps_per_round=5, inner__warmup_updates=10),
    "rounds that grow": dict(inner__max_steps_per_round=400, inner__schedule="cosine"),
    "rounds by a rule": dict(inner__round_length="own", inner__schedule="linear"),
    "a constant rate's end": dict(inner__final_lr_frac=0.1),
    "not a multiple": dict(inner__max_steps_per_round=300),
    "more than the pool": dict(ensemble__initial_workers=5),
    "fewer than trainers": dict(ensemble__initial_workers=3),
    "nobody else joins": dict(ensemble__initial_workers=4, batching__growth=("batch",)),
    "no test to join by": dict(ensemble__initial_workers=4, batching__test="constant"),
    "a share of what?": dict(ensemble__spawn_frac=0.1),
    "twice": dict(batching__growth=("batch", "batch")),
    "no room for a sample": dict(eval__sample_tokens=512),
    "a classifier's sample": BERT | dict(eval__sample_tokens=5),
    "a classifier's documents": BERT | dict(data__attention="document"),
    "chats in text": dict(data__source="text", data__path="x", data__text_column="messages"),
    "answers of text": dict(data__loss="all"),
    "inner decay": dict(inner__tx="sgd"),
    "fragments of unequal rounds": dict(outer__fragments=3),
    "a fragment late for the next": dict(outer__fragments=4, outer__delay_updates=50),
    "mixing of nothing": dict(outer__mixing=0.5),
    "clipping without learners": dict(outer__clip_workers=2.0),
    "first batch above the device's": dict(
        batching__initial_batch_size=17, batching__max_batch_size=16
    ),
    "first batch above the cap": dict(batching__initial_batch_size=3, batching__batch_cap=2),
    "buckets below": dict(batching__buckets=(1, 2), batching__initial_batch_size=4),
    "buckets above": dict(batching__buckets=(16,), batching__batch_cap=8),
    "no ramp": RAMP,
    "ramp unused": dict(batching__ramp=((0, 1),)),
    "ramp from round 1": RAMP | dict(batching__ramp=((1, 1), (2, 2))),
    "ramp's rounds": RAMP | dict(batching__ramp=((0, 1), (2, 2), (2, 3))),
    "ramp's first batch": RAMP | dict(batching__ramp=((0, 2),)),
    "ramp above the cap": RAMP | dict(batching__ramp=((0, 1), (2, 1025))),
    "ramp falls": RAMP | dict(batching__ramp=((0, 1), (2, 3), (4, 2))),
}


@pytest.fixture
def own_rules(monkeypatch):
    """Entries "own" that a config file would add; `validate` calls none."""
    monkeypatch.setitem(AGGREGATORS, "own", None)
    monkeypatch.setitem(ROUND_LENGTHS, "own", None)


@pytest.mark.usefixtures("own_rules")
def test_a_contradiction_is_one_line_that_names_its_keys_and_every_rule_has_one():
    lines = []
    for values in CONTRADICTIONS.values():
        (line,) = faults(changed(**values))
        lines.append(line)
        keys = {key.replace("__", ".") for key in values}
        assert any(f"{key} = " in line for key in keys) and ";" in line
    needs = {line.partition(": ")[2] for line in lines}
    tree = ast.parse(inspect.getsource(settings_module))
    count = sum(isinstance(node, ast.Yield) for node in ast.walk(tree))
    of_tables = {need for rule in tables()["ARCHITECTURES"].values() for *_, need in rule.rules}
    of_tables |= {need for s in tables()["DATA_SOURCES"].values() for need in s.refuses.values()}
    assert len(needs - of_tables) == count - 1


def test_a_rule_is_checked_only_if_each_value_is_allowed_by_itself():
    for values in (dict(outer__fragments=3, inner__steps_per_round=0), dict(model__max_length=0)):
        (line,) = faults(changed(**values))
        assert "must be" in line


@pytest.mark.usefixtures("own_rules")
def test_what_is_no_contradiction_passes():
    for values in (
        dict(data__source="text", data__path="x.txt", data__heldout_path="y.txt"),
        dict(data__source="hf", data__path="allenai/c4", data__name="en", data__split="test"),
        dict(data__sequence_length=512),
        dict(model__vocab_size=256, data__tokenizer="tokenizer.json"),
        BERT | dict(model__width=60, model__num_kv_heads=3),
        dict(ensemble__num_trainers=1, ensemble__num_workers=1),
        dict(inner__round_length="own"),
        dict(inner__round_length="own", inner__schedule="cosine", num_tokens=10**6),
        dict(inner__tx="sgd", inner__weight_decay=0, outer__tx="adamw"),
        dict(batching__initial_batch_size=16, batching__batch_cap=16),
        RAMP | dict(batching__ramp=((0, 1), (3, 4), (5, 4), (6, 1024))),
    ):
        validate(changed(**values))


def test_limits_that_are_unset_follow_the_first_batch():
    for test, growth, cap, largest, expected in (
        ("constant", ("batch",), None, "auto", (8, 8, (8,))),
        ("norm", ("workers", "rounds"), None, "auto", (8, 8, (8,))),
        ("norm", ("batch",), 8, "auto", (8, 8, (1, 2, 3, 4, 6, 8))),
        ("norm", ("batch",), 12, "auto", (None, 12, (1, 2, 3, 4, 6, 8, 12))),
        ("norm", ("batch",), None, 16, (16, 1024, (1, 2, 3, 4, 6, 8, 12, 16))),
        ("constant", ("batch",), 32, 16, (16, 32, (8, 16))),
    ):
        config = changed(
            batching__test=test,
            batching__growth=growth,
            batching__initial_batch_size=8,
            batching__batch_cap=cap,
            batching__max_batch_size=largest,
        )
        found = completed(validate(config), reads=False)
        limits = found.batching
        assert (limits.max_batch_size, limits.batch_cap, limits.buckets) == expected
        assert completed(found, reads=False) == found
    config = changed(batching__initial_batch_size=2000)
    assert completed(validate(config), reads=False).batching.batch_cap == 2000


def test_each_learner_has_one_worker_unless_their_number_is_set(tmp_path):
    def workers(num_workers=None, num_trainers=1, workdir=None, **engine):
        config = changed(ensemble__num_workers=num_workers, ensemble__num_trainers=num_trainers)
        for key, value in engine.items():
            config["engine"][key] = value
        return completed(validate(config), workdir, reads=False).ensemble.num_workers

    assert (workers(), workers(kind="ray"), workers(kind="ray", max_learners=3)) == (4, 2, 3)
    assert workers(kind="ray", max_learners=2, num_trainers=3) == 3
    assert workers(6, kind="ray", max_learners=2) == 6
    (tmp_path / "config.json").write_text('{"config": {"ensemble": {"num_workers": 5}}}')
    assert workers(workdir=tmp_path, kind="ray", max_learners=3) == 5  # a run keeps its workers


def test_validation_reads_no_file():
    """Rules about what is still to be found wait for `completed`."""
    config = changed(model__init_from="./missing", data__path="missing.txt")
    config["data"]["sequence_length"] = 100_000
    settings = validate(config)
    assert {"data.source", "data.text_column", "model.width"} <= settings.unset
    with pytest.raises(UserError, match="./missing"):
        completed(settings)
    with pytest.raises(UserError, match="missing.txt"):
        completed(validate(changed(data__path="missing.txt")))


# --- The configs that ship ------------------------------------------------------------------


SHIPPED = sorted(CONFIGS.glob("[!_]*.py"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_locked(path, monkeypatch):
    config = load(path.stem, monkeypatch)
    assert config.is_locked
    if path.stem == "finetune":
        assert [line.split(" = ")[0] for line in faults(config)] == ["adapter.rank"]
        config.adapter.rank = 0  # or else weights are named, which are read
    validate(config)


def test_adloco_is_microllama_with_another_model_text_rate_and_batches(monkeypatch):
    small, paper = (flat(load(name, monkeypatch)) for name in ("adloco", "microllama"))
    others = {key for key in OPTIONS if small[key] != paper[key]}
    assert {key for key in others if key.partition(".")[0] not in ("model", "data")} == {
        *(f"batching.{key}" for key in ("max_batch_size", "buckets", "batch_cap")),
        "inner.learning_rate",
    }
    assert (small["model.dtype"], small["model.init_from"]) == ("float32", "")
    assert (small["data.source"], small["data.path"]) == (None, "")


FEWER = {"ensemble.num_trainers", "batching.test", "merge.policy"}
FEWER |= {
    "ensemble.num_workers",
    "batching.max_batch_size",
    "batching.batch_cap",
    "batching.buckets",
}
OTHER_TX = {"inner.tx", "inner.learning_rate", "outer.tx", "outer.learning_rate"}
MUON = {"inner.tx", "inner.learning_rate"} | {
    f"outer.{key}" for key in ("learning_rate", "momentum", "average")
}

STREAMING = {"outer.fragments", "outer.delay_updates", "outer.mixing"}
ONE_STEP = {"inner.steps_per_round", "num_rounds", "eval.every_rounds", "log.every_rounds"}


def test_baselines_differ_by_these_keys_only_and_make_as_many_updates(monkeypatch):
    quickstart = flat(load("quickstart", monkeypatch))
    for name, keys in (
        ("diloco", MUON),
        ("streaming_diloco", STREAMING),
        ("local_sgd", OTHER_TX),
        ("data_parallel", OTHER_TX | ONE_STEP),
    ):
        baseline = flat(load(name, monkeypatch))
        assert {key for key in OPTIONS if quickstart[key] != baseline[key]} == FEWER | keys
        updates = [c["num_rounds"] * c["inner.steps_per_round"] for c in (quickstart, baseline)]
        assert updates[0] == updates[1]
