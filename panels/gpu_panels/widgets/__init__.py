"""Our own browser components. Each component has a Python file, and JavaScript and CSS files of the
same name.

The components only display values. The tabs decide which values these are.
"""
