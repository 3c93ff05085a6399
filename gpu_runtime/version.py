"""The version of gpu-console. A runtime records it with each decision, so nothing is read for it."""

VERSION = "0.1.0"
