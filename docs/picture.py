"""Draws README's picture, the top of the demo's report, in a real browser: python docs/picture.py.

It writes docs/report.png, and docs/report.sha256 with a hash of its content, which a test compares with the
report of today.
"""

import base64
import hashlib
import html
import io
import re
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_STYLE = ROOT / "reagent_lite/report/style.css"
_HIDE = """
document.documentElement.style.overflow = 'hidden';
document.querySelectorAll('.facts, nav, header > p, .card p').forEach(each => { each.remove(); });
"""
_BOTTOM = "document.querySelector('.cards').getBoundingClientRect().bottom + 12"
_WIDTH, _HEIGHT = 720, 1400
_COLORS = 48  # as letters and lines need few, a fourth of the bytes


def shown(page: str) -> str:
    """Returns a hash of the texts in the picture (title, decision, evidence and chart), and of the page's style."""
    parts = re.findall(r'<h1.*?</h1>|<div class="verdict.*?</div>|<h2 id="estimates">.*?</figure>', page, re.DOTALL)
    assert len(parts) == 3
    texts = re.findall(r">([^<]+)<", "".join(parts))
    words = " ".join(" ".join(html.unescape(text).split()) for text in texts)
    return hashlib.sha256((words + _STYLE.read_text()).encode()).hexdigest()


def main() -> None:
    """Trains the demo's model in a temporary folder, and draws its report."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.browser import browsing
    from PIL import Image

    import reagent_lite
    from reagent_lite.config.loader import read_tree

    with tempfile.TemporaryDirectory() as folder:
        log = str(ROOT / "configs/offers/log.csv")
        config = read_tree(ROOT / "configs/offers/dqn.json")[0]
        reagent_lite.train(config | {"model_output_path": f"{folder}/offers", "use_gpu": False}, log)
        report = Path(folder, "offers/report.html")
        with browsing(Path(folder, "profile")) as browser:
            browser.open(report, width=_WIDTH)
            browser.value(_HIDE)
            browser.ask("Emulation.setDeviceMetricsOverride", width=_WIDTH, height=_HEIGHT, deviceScaleFactor=1,
                        mobile=False)  # fmt: skip
            clip = {"x": 0, "y": 0, "width": _WIDTH, "height": browser.value(_BOTTOM), "scale": 1.5}
            picture = browser.ask("Page.captureScreenshot", format="png", clip=clip)["data"]
        image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
        image.quantize(_COLORS, dither=Image.Dither.NONE).save(DOCS / "report.png", optimize=True)
        (DOCS / "report.sha256").write_text(f"{shown(report.read_text())}\n")


if __name__ == "__main__":
    main()
