"""Pure views of facts for every face: text, HTML and JSON of a snapshot, a plan or an outcome.

Nothing here reads a runtime, a device or a clock (`progress` excepted), and nothing imports Panel.
"""
