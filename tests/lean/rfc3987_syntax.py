"""Stands for the package of this name, which `make test` needs nowhere.

Importing it builds a grammar, which takes 1.8 s of the processor in each process that imports nbformat: every test
worker and every JupyterLab. `jsonschema` does without it: it then checks no IRIs. This folder is on the path of
`make test` only.
"""

raise ImportError("the tests check no IRIs")
