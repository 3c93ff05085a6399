"""The operator's console: a Panel page over the runtime's snapshots, served or inside a notebook.

It uses the runtime only through its public methods; decisions about memory are made elsewhere.
Importing this package imports neither Panel nor Bokeh: its modules do, when the first page is made.
"""
