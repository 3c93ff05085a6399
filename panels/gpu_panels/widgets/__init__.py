"""Our own browser components, each in one Python file beside its JavaScript and CSS.

They show what they are given; tabs decide what that is.
"""
