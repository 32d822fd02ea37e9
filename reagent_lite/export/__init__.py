"""Exported models: written and checked here, and loaded without the rest of the package.

Importing this package does not import torch: a machine that serves a model needs numpy and onnxruntime only. Import
`reagent_lite.export.predictor` and `reagent_lite.export.writer` to write a bundle.
"""

import os

# read by onnxruntime at import; by default it opens a database in the user's cache and sends the contents
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


from reagent_lite.export.bundle import Bundle, Prediction, load_bundle

__all__ = ["Bundle", "Prediction", "load_bundle"]
