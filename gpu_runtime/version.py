"""The version of gpu-console, as a constant.

A runtime records the version with each decision. Because it is a constant, no file or package
metadata has to be read.
"""

VERSION = "0.1.0"
