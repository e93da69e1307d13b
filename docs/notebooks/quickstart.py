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
# Trains a small language model with AdLoCo on the source of Python's standard library, like the
# first half of `configs/quickstart.py`. Several trainers (copies of the model) train side by side;
# batches grow with the measured gradient noise, by accumulation where a worker cannot hold them;
# then the trainers merge. Less than a minute on two CPU cores, faster if that run left its compiled
# programs.

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
# `default_config()` has every setting with its default. It is locked: a misspelt setting raises an
# error.

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
config.batching.eta = 0.3  # the allowed deviation of the mean gradient over its norm
config.batching.initial_batch_size = 4
config.batching.max_batch_size = 8  # what one worker holds at once
config.batching.buckets = (4, 8)  # the micro-batch sizes to compile for
config.batching.batch_cap = 16
config.batching.max_growth = 2
config.merge.width = 3  # all trainers become one

result = train(config, workdir)

# %% [markdown]
# The run's folder has the ledger (one event per line) and a report made from it:

# %%
from html import escape

from IPython.display import HTML

page = result.workdir / "report" / "index.html"
frame = f'<iframe srcdoc="{escape(page.read_text())}" width="100%" height="900"></iframe>'
HTML(f"<div>{frame}</div>")

# %% [markdown]
# It also has the model in Hugging Face layout, which `transformers` loads. After half a minute on
# bytes it writes frequent letters and some short words; for more, increase `num_rounds`.

# %%
import jax
import numpy as np

from adloco_jax.models import hf
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
# `result.params` is the same model as a pytree, `result.ensemble` the final state of all trainers
# and workers. The pure functions of the run (`init`, `outer_step`, `gradient_stats`, `norm_test`,
# `merge`, …) work with any loss function and parameters: see the notebooks `outer_step_anywhere`
# and `batch_size_tests`.

# %%
jax.tree.map(lambda leaf: leaf.shape, result.params)
