"""The operator's console: a Panel page over the runtime's snapshots, served or inside a notebook.

Importing this package imports neither panel nor bokeh; its modules do when the first page is made.
"""
