"""Lengths of sequences: a distribution of them, from numbers or from files, and what to expect of a batch."""

from loadgauge.core.base.lengths.distribution import Lengths, RankGroups
from loadgauge.core.base.lengths.files import LONGEST

__all__ = ["LONGEST", "Lengths", "RankGroups"]
