"""Our own browser components. Each has a Python file, and JavaScript and CSS files of the same name.

The components only show values. The tabs decide which values are shown.
"""
