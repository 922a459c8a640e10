"""Convert and check what the engine runs; called by install-engine with the engine's own Python.

engine-model.py convert WEIGHTS.gguf OUT
engine-model.py check MODEL
engine-model.py check-lmcache
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAYERS, VOCABULARY, CONTEXT_TOKENS = 30, 49152, 8192
PARAMETERS = 134_515_008


def convert(gguf: Path, out: Path) -> None:
    """Write the weights in bfloat16 with tokenizer and chat template, as vLLM loads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without dequantize the weights stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    require(model.num_parameters() == PARAMETERS, f"{model.num_parameters()} parameters")
    check_files(out)


def check(model: Path) -> None:
    """Fail unless vLLM chooses the CPU and the tokenizer renders and encodes as it should."""
    check_files(model)
    from transformers import AutoTokenizer
    from vllm.platforms import current_platform

    require(current_platform.is_cpu(), f"vLLM chose {current_platform.device_type}, not the CPU")
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    text = "Paris is the capital of France; 3.14 is not e. Grüße, 北京!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    require(tokenizer.decode(ids) == text, "the tokenizer does not give its text back")
    require(len(ids) < len(text), "the tokenizer has no merges")
    turn = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    wanted = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    require(rendered.endswith(wanted), f"the chat template renders {rendered!r}")


def check_lmcache() -> None:
    """Fail unless LMCache and its numpy come from this environment and vLLM takes the connector."""
    import lmcache.cli.main
    import numpy
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    for module in (lmcache, numpy):
        file = Path(str(module.__file__))
        require(file.is_relative_to(sys.prefix), f"{module.__name__} comes from {file}")
    require(current_platform.is_cpu(), f"vLLM chose {current_platform.device_type}, not the CPU")
    connector = KVConnectorFactory.get_connector_class_by_name("LMCacheMPConnector")
    require(connector.__module__.startswith("lmcache."), f"the connector is {connector}")


def check_files(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    shape = (
        config["num_hidden_layers"],
        config["vocab_size"],
        config["max_position_embeddings"],
    )
    require(shape == (LAYERS, VOCABULARY, CONTEXT_TOKENS), f"the model's shape is {shape}")
    weights_bytes = (model / "model.safetensors").stat().st_size
    require(weights_bytes > 2 * PARAMETERS, f"only {weights_bytes} bytes of weights")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        require((model / name).is_file(), f"{name} is missing")


def require(holds: bool, complaint: str) -> None:
    if not holds:
        sys.exit(f"engine-model: {complaint}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["convert", gguf, out]:
            convert(Path(gguf), Path(out))
        case ["check", model]:
            check(Path(model))
        case ["check-lmcache"]:
            check_lmcache()
        case _:
            sys.exit(__doc__)
