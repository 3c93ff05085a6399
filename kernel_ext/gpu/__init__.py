"""The IPython face: `%load_ext gpu`."""
