# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # AdLoCo in a notebook
#
# This notebook trains a small language model with AdLoCo on the source text of Python's standard
# library. Several trainers (copies of the model) are trained side by side. Their batches grow with
# the measured gradient noise. If a batch is larger than a worker can process at once, gradients are
# accumulated. Then the trainers merge. The run takes less than a minute on two CPU cores. It is
# like the first half of the run of `configs/quickstart.py`. If that run was made before on this
# machine, the notebook is faster, because compiled programs are kept.

# %%
repository = ""  # only for Colab: the address of this notebook's repository, "https://..."

import subprocess
import sys

if "google.colab" in sys.modules:  # Colab's own jax, with its GPU, stays
    assert repository, "set `repository` above to the address of this notebook's repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{repository}"], check=True)

# %% tags=["parameters"]
num_rounds = 5
workdir = None  # a fresh folder under runs/

# %% [markdown]
# `default_config()` returns a config that has every setting with its default. The config is locked,
# so a misspelt name of a setting raises an error.

# %%
from adloco_jax import train
from adloco_jax.config import default_config

config = default_config()
config.num_rounds = num_rounds
config.inner.steps_per_round = 30
config.inner.learning_rate, config.inner.weight_decay = 1e-3, 0.0
config.model.width, config.model.mlp_width, config.model.num_layers = 64, 176, 2
config.model.max_length = 256  # bytes that it can read, and write
config.data.sequence_length = 64
config.data.num_sequences = 40_000
config.ensemble.num_trainers = config.ensemble.num_workers = 3
config.batching.eta = 0.3  # the allowed ratio of gradient noise to signal
config.batching.initial_batch_size = 4
config.batching.max_batch_size = 8  # what one worker holds at once
config.batching.buckets = (4, 8)  # the micro-batch sizes to compile for
config.batching.batch_cap = 16
config.batching.max_growth = 2
config.merge.width = 3  # all trainers become one

result = train(config, workdir)

# %% [markdown]
# The folder of the run has the ledger (the log of the run, with one event per line) and a report
# that is made from the ledger:

# %%
from html import escape

from IPython.display import HTML

page = result.workdir / "report" / "index.html"
frame = f'<iframe srcdoc="{escape(page.read_text())}" width="100%" height="900"></iframe>'
HTML(f"<div>{frame}</div>")

# %% [markdown]
# The folder also has the trained model in the layout of Hugging Face, which `transformers` can load
# without conversion. The next cell loads the model and lets it continue a prompt. After half a
# minute of training on bytes, the model writes frequent letters and some short words, but no
# meaningful text. For a better model, increase `num_rounds`.

# %%
import jax
import numpy as np

from adloco_jax import hf
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.models.llama import generate

exported = result.workdir / "export"
network, params, *_ = hf.load(exported)
tokenizer = load_tokenizer(str(exported))
prompt = [tokenizer.eot_id, *tokenizer.encode_batch(["    def __init__(self"])[0]]
texts_BL = generate(
    network,
    params,
    np.tile(np.array(prompt, np.int32), (3, 1)),  # three samples
    num_tokens=100,
    temperature=0.7,
    key=jax.random.key(0),
)
for tokens in np.asarray(texts_BL):
    print(tokenizer.decode(tokens[1:]), end="\n" + "-" * 72 + "\n")

# %% [markdown]
# `result.params` has the parameters of the same model as a pytree. `result.ensemble` is the final
# state of all trainers and workers. The pure functions that the run uses (`init`, `outer_step`,
# `gradient_stats`, `norm_test`, `merge`, …) work with any loss function and any parameters. The
# notebook `outer_step_anywhere` shows these functions on a network of your own. The notebook
# `batch_size_tests` shows what the batch-size tests measure.

# %%
jax.tree.map(lambda leaf: leaf.shape, result.params)
