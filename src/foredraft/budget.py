"""What a proposer is told about the size of a draft."""

from __future__ import annotations


class Budget(int):
    """The most nodes of a draft, and when a drafter that runs level by level should go on."""

    least: float  # a node that is less likely to be accepted is not worth its children's rows
    beyond: float  # nodes that are more likely must exceed it by so much in all to be worth another run

    def __new__(cls, nodes: int, least: float = 0.0, beyond: float = 0.0) -> Budget:
        budget = super().__new__(cls, nodes)
        budget.least, budget.beyond = least, beyond
        return budget

    def at_most(self, nodes: int) -> Budget:
        return self if self <= nodes else Budget(nodes, self.least, self.beyond)
