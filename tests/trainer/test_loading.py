"""Parts of a run that are built from a model folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from areal_core.trainer.loading import load_tokenizer


def test_load_tokenizer_when_transformers_does_not_know_the_model_expected_it_without_a_warning(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "areal_test_unknown", "hidden_size": 8}))
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)

    try:
        tokenizer = load_tokenizer(str(tmp_path))
    finally:
        logging.getLogger("transformers").removeHandler(handler)

    assert tokenizer.convert_tokens_to_ids("two") == 1
    assert [record.getMessage() for record in records] == []
