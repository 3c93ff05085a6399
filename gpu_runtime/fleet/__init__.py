"""Many hosts, on Ray: one place to ask, many hosts that hold models.

Ray carries membership, actors and messages. Each host keeps its own book, and its agent decides
there with the scheduler that notebooks use. The controller stores wishes only. Ray is imported when
the first function of this package is called, never at its import.
"""
