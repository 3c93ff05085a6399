"""Our own browser components: one Python file each, with JavaScript and CSS files of the same name.

They only show values; the tabs decide which values.
"""
