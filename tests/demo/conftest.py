"""Models of the page and a served page, shared by the tests of the browser and those without."""

import shutil

import pytest
import torch

import recnmt_hf
from recnmt_hf.training.evidence import Evidence


HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'
CARD = f"""---
license: mit
---

# A small model

{HOSTILE} and ![picture](http://example.invalid/p.png), then `a < b`.

```python
print("<b>code</b>")
```

| step | validation perplexity | validation loss | training perplexity | memory of the accelerator |
|---|---|---|---|---|
| 1,000 | 123456.78 | 12.345 | 123456.78 | 123456.78 |
"""


@pytest.fixture(scope="session")
def hostile():
    """HTML that would run a script."""
    return HOSTILE


@pytest.fixture(scope="session")
def plain_model(tiny_folder, tmp_path_factory):
    """The tiny base Transformer with a card and evidence that contain HTML and scripts."""
    folder = tmp_path_factory.mktemp("page") / "plain" / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "README.md").write_text(CARD)
    Evidence(languages=["en", HOSTILE], example=f"A dog sleeps. {HOSTILE}").save(folder)
    return folder


@pytest.fixture(scope="session")
def gret_model(tokenizer, tmp_path_factory):
    """A tiny random GRET without card and evidence."""
    torch.manual_seed(2)
    config = recnmt_hf.GRETConfig.from_preset("tiny", vocab_size=len(tokenizer), num_capsules=4)
    folder = tmp_path_factory.mktemp("page") / "gret"
    recnmt_hf.GRETForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder
