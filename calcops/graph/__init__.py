"""Forces of graph potentials from their edges, and packages of MACE's and SevenNet's models."""

from calcops.graph.edge_forces import edge_forces

__all__ = ["edge_forces"]
