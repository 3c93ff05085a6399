"""The version of gpu-console, as a constant.

A runtime records the version with each decision. So no file or package metadata is read for it.
"""

VERSION = "0.1.0"
