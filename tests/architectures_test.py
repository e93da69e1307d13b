"""The table of architectures: the built-in entries, and one from a user's config file."""

from pathlib import Path

import jax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from toy import config_of

from adloco_jax import ARCHITECTURES
from adloco_jax import main as cli
from adloco_jax.cli.names import load_config
from adloco_jax.config import default_config, validate
from adloco_jax.core.types import label_by_name
from adloco_jax.engine.optimizers import inner_transform, labeller
from adloco_jax.errors import ConfigError
from adloco_jax.models import Bert, Llama, hf
from adloco_jax.models.configured import build_model, build_network
from adloco_jax.models.layers import param_shapes
from adloco_jax.run.kept.ledger import read

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = Path(__file__).parents[1]
SIZES = dict(vocab_size=11, width=8, num_layers=2, num_heads=2, mlp_width=12, max_length=9)
LLAMA, BERT = Llama(**SIZES, num_kv_heads=1), Bert(**SIZES, num_classes=3)


@pytest.fixture
def own(monkeypatch) -> Path:
    """The example that adds a model; the table is restored afterwards."""
    with monkeypatch.context() as patch:
        patch.setitem(ARCHITECTURES, "mlp", ARCHITECTURES["llama"])
        yield ROOT / "examples" / "model.py"


def test_a_users_model_trains_through_the_command_line_and_is_left(own, tmp_path, capsys):
    workdir, out = tmp_path / "r", tmp_path / "out"
    options: dict = {"num_rounds": 1, "inner.steps_per_round": 40, "inner.learning_rate": 0.01}
    options |= {
        "data.source": "text",
        "data.path": ROOT / "docs" / "*.md",
        "data.num_sequences": 200,
    }
    options |= {"ensemble.num_trainers": 1, "ensemble.num_workers": 1, "eval.num_sequences": 8}
    options |= {"data.sequence_length": 16, "batching.test": "constant", "model.width": 16}
    options |= {"batching.max_batch_size": 1, "batching.batch_cap": 1}
    overrides = [f"--config.{key}={value}" for key, value in options.items()]
    assert cli.main([f"--config={own}", f"--workdir={workdir}", *overrides]) == 0
    evals = [event["loss"] for event in read(workdir / "ledger.jsonl") if event["event"] == "eval"]
    assert evals[-1] < 5.4  # an untrained model has log 257 = 5.55
    assert "the model has no Hugging Face names" in capsys.readouterr().out
    file = workdir / "export" / "params.safetensors"
    assert load_file(file)["Embed_0/embedding"].shape == (257, 16)
    export = ["export", str(workdir), f"--out={out}", f"--config={own}"]
    assert cli.main(export) == 2 and not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{out}: MLP has no Hugging Face names; give its Architecture a weight_map"


def test_a_users_model_starts_from_no_checkpoint(own):
    config = load_config(own)
    config.model.init_from = "somewhere"
    settings, found = validate(config), hf.PretrainedModel(LLAMA, None, ("float32",), (), {}, "")
    with pytest.raises(ConfigError, match="model.arch = mlp: somewhere is a Llama"):
        hf.require_same_network(build_network(settings.model), found, settings.model)


def test_labels_say_which_leaves_are_matrices_and_which_are_stacked_by_layer():
    label_params, params = ARCHITECTURES["llama"].label_params, param_shapes(LLAMA)
    kernels = {name: {"kernel": "stacked_matrix"} for name in ("query", "key", "value", "out")}
    mlp = {name: {"kernel": "stacked_matrix"} for name in ("gate", "up", "down")}
    norm = {"scale": "stacked_other"}
    assert label_params(params) == {
        "embed": {"embedding": "embedding"},
        "layers": {"attention": kernels, "mlp": mlp, "attention_norm": norm, "mlp_norm": norm},
        "norm": {"scale": "other"},
        "head": {"kernel": "head"},
    }
    labels = ARCHITECTURES["bert"].label_params(param_shapes(BERT))
    assert labels["pooler"] == {"kernel": "matrix", "bias": "other"}
    assert labels["classifier"] == {"kernel": "head", "bias": "other"}
    assert labels["position"] == {"embedding": "embedding"}
    assert labels["layers"]["mlp"]["up"] == {"kernel": "stacked_matrix", "bias": "stacked_other"}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"wte": (9, 4), "h_0/mlp/w": (4, 6), "h_0/mlp/b1": (6,), "ln_f": (4,)}, "embedding"),
        ({"tok_emb": (9, 4), "lm_head": (4, 9), "Dense_0/kernel": (4, 4)}, "embedding head"),
        ({"embed_tokens/value": (9, 4), "layers/norm_1/scale": (3, 4), "up": (4, 6)}, "embedding"),
        ({"w": (4, 4)}, r"w \[4, 4\]"),  # no embedding is known, so this may be one
        ({"embed": (9, 4), "out": (4, 9)}, r"out \[4, 9\]"),  # may be the head
        ({"embed": (9, 4), "multi_head/w": (3, 4, 4), "b": (3, 4)}, r"multi_head/w \[3, 4, 4\]"),
    ],
)
def test_names_label_embeddings_heads_and_norms_and_what_is_unclear_is_asked_for(shapes, expected):
    params = unflatten_dict({k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}, "/")
    for label_params in (label_by_name, ARCHITECTURES["llama"].label_params):
        if "[" in expected:
            with pytest.raises(ValueError, match=f"names do not say what {expected} is; give labe"):
                label_params(params)
            continue
        labels = {k: label for k, label in flatten_dict(label_params(params), sep="/").items()}
        found = [label for label in labels.values() if label not in ("matrix", "other")]
        assert sorted(found) == expected.split()
        matrices = {"h_0/mlp/w", "Dense_0/kernel", "up"} & {*shapes}
        assert {k for k, label in labels.items() if label == "matrix"} == matrices


def test_muon_takes_what_the_architecture_labels_as_matrices():
    tx = inner_transform(validate(config_of(inner={"tx": "muon"})).inner, labeller("llama"))
    _, state = jax.eval_shape(tx.init, param_shapes(LLAMA))
    adam, *_ = state.inner_states["other"].inner_state
    assert len(jax.tree.leaves(adam.nu)) == 5  # embedding, head and three gains


def test_an_entry_builds_what_the_config_describes():
    for name, network in (("llama", LLAMA), ("bert", BERT)):
        config = default_config()
        config.model.update(dict(SIZES, arch=name, num_kv_heads=1, num_classes=3, vocab_size=300))
        config.data.update(dict(sequence_length=9, source="jsonl", path="x"))
        init_fn, loss_fn = build_model(validate(config).model)
        expected = param_shapes(network.clone(vocab_size=300))
        assert jax.eval_shape(init_fn, jax.random.key(0)) == expected
        assert loss_fn.__module__.endswith(name)
        assert hf.weight_map(network).model is type(network)
