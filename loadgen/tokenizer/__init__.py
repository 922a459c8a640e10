"""The tokenizer the simulated replicas ship, laid out like a Hugging Face folder.

`scripts/train-tokenizer` makes tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path


def default_folder() -> Path:
    """Folder with tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    return Path(__file__).resolve().parent
