"""Entries that a user's config file adds: every snippet of docs/extend.md runs through `fit`."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax import (
    AGGREGATORS,
    BATCH_TESTS,
    INNER_OPTIMIZERS,
    MERGE_POLICIES,
    OUTER_OPTIMIZERS,
    ROUND_LENGTHS,
)
from adloco_jax.cli.names import load_config
from adloco_jax.config import validate
from adloco_jax.errors import ConfigError
from adloco_jax.run.ledger import read
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
# architectures_test.py and own_source_test.py run the snippets with a model or a data source.
OWN = ("DATA_SOURCES[", "ARCHITECTURES[")
SNIPPETS = [snippet for snippet in SNIPPETS if not any(name in snippet for name in OWN)]


@pytest.fixture(autouse=True)
def tables_as_they_were():
    with contextlib.ExitStack() as stack:
        optimizers = (INNER_OPTIMIZERS, OUTER_OPTIMIZERS)
        for table in (AGGREGATORS, BATCH_TESTS, MERGE_POLICIES, ROUND_LENGTHS, *optimizers):
            stack.enter_context(mock.patch.dict(table))
        yield


def run(workdir, settings, **others):
    functions = {"init_fn": init_fn, "loss_fn": bigram_loss, "corpus": corpus()} | others
    return fit(settings, workdir=workdir, **functions)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_a_snippet_trains(index, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SNIPPETS[index], encoding="utf-8")
    own = validate(load_config(path, "get_config", ConfigDict))
    test, policy = own.batching.test, own.merge.policy
    settings = settings_of(
        num_rounds=3,
        ensemble={"num_trainers": 2 if policy in SNIPPETS[index] else 1, "num_workers": 2},
        inner={"tx": own.inner.tx, "round_length": own.inner.round_length},
        outer={"tx": own.outer.tx, "aggregator": own.outer.aggregator},
        batching={"test": test, "test_batch_size": 8},
        merge={"policy": policy, "every_rounds": 2},
        eval={"every_rounds": 3},
    )
    result = run(tmp_path / "run", settings)
    assert np.isfinite(result.loss) and result.loss < 1.79  # an untrained model has log 6
    events = read(tmp_path / "run" / "ledger.jsonl")
    if test == "noise_scale":
        assert any(e["test_value"] for e in events if e["event"] == "round")
    if own.inner.round_length == "post_local":
        assert [e["updates"] for e in events if e["event"] == "round"] == [3, 3, 12]
    if policy == "highest_losses":
        (merge,) = (e for e in events if e["event"] == "merge")
        # the best is the representative
        assert merge["loss_before"] == sorted(merge["loss_before"])


def test_fit_takes_the_callers_optimizers_at_the_configured_rate(tmp_path):
    """AdamW and Nesterov as arguments equal AdamW and Nesterov by name."""
    named = settings_of(num_rounds=2, ensemble={"num_trainers": 1, "num_workers": 2})
    given = {
        "inner_tx": optax.adamw(1.0, weight_decay=named.inner.weight_decay),
        "outer_tx": optax.sgd(1.0, momentum=0.9, nesterov=True),
    }
    results = [run(tmp_path / "named", named), run(tmp_path / "given", named, **given)]
    jax.tree.map(np.testing.assert_array_equal, *(result.params for result in results))


def test_an_optimizer_given_and_named_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="inner_tx: given beside inner.tx='sgd'; leave inner.tx"):
        sgd = settings_of(inner={"tx": "sgd", "weight_decay": 0.0})
        run(tmp_path / "r", sgd, inner_tx=optax.lion(1.0))
    assert list(tmp_path.iterdir()) == []
