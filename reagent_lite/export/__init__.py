"""Exported models: writing them checked, and loading them without the rest of the package.

Importing this package imports no torch: a machine that serves a model needs numpy
and onnxruntime only. What writes a bundle is imported from `reagent_lite.export.predictor` and
`reagent_lite.export.writer`.
"""

import os

# onnxruntime reads it when it is imported; it would open a database in the user's cache and send what is in it
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


from reagent_lite.export.bundle import Bundle, Prediction, load_bundle

__all__ = ["Bundle", "Prediction", "load_bundle"]
