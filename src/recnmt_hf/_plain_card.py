"""The card of a model without evidence of its training, and code that translates with transformers alone."""

import json
from pathlib import Path
from typing import Any


CARD = "README.md"
# From the card that transformers gives to a repository without one; its code calls pipelines that are gone.
TEMPLATE_OF_TRANSFORMERS = "model card of a 🤗 transformers model that has been pushed on the Hub"


def usage(name: str, is_joint: bool, sentence: str) -> str:
    """Return code that translates with transformers alone; unless `is_joint`, the target has a tokenizer of its own."""
    import_config, load_target, side = "", "", ""
    if not is_joint:
        # Without a configuration of its own, the tokenizer expects one in the subfolder.
        settings = 'subfolder="target_tokenizer", config=PreTrainedConfig()'
        load_target = f"target_tokenizer = AutoTokenizer.from_pretrained(name, {settings})\n"
        import_config, side = ", PreTrainedConfig", "target_"
    return f"""from transformers import AutoModelForSeq2SeqLM, AutoTokenizer{import_config}

name = {json.dumps(name, ensure_ascii=False)}
# The model's own code runs; where recnmt_hf is imported, it is taken from there.
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
{load_target}batch = tokenizer([{json.dumps(sentence, ensure_ascii=False)}], return_tensors="pt")
tokens = model.generate(**batch)
print({side}tokenizer.batch_decode(tokens, skip_special_tokens=True)[0])"""


def write_plain_card(config: Any, folder: str | Path, name: str = "PLACE/OF-THIS-MODEL") -> None:
    """Write a card from a configuration alone into a folder without one, or only with the default of transformers."""
    path = Path(folder) / CARD
    if path.is_file() and TEMPLATE_OF_TRANSFORMERS not in path.read_text(encoding="utf-8"):
        return
    kind = getattr(config, "model_type", "")
    architecture = next(iter(getattr(config, "architectures", None) or []), kind)
    code = usage(name, bool(getattr(config, "share_encoder_decoder_embeddings", True)), "...")
    if not getattr(config, "auto_map", None):
        code = f"# First import the module that registers {kind}: its code is not part of this folder.\n{code}"
    card = f"""---
library_name: transformers
pipeline_tag: translation
tags: [translation, recnmt_hf, {kind}]
---

# {architecture}

An encoder-decoder of the type `{kind}`, made with [recnmt_hf](https://github.com/recnmt-hf/recnmt_hf). Its training
data and the quality of its translations are not documented yet.

```python
{code}
```
"""
    path.write_text(card, encoding="utf-8")
