"""External memory: how long bytes take, from bandwidth alone or with row activations and refresh.

Addresses go to a channel by the burst, then to a column, a bank and a row; so the bursts that all channels hold of one row
are neighbours. Modes:

- ``flat``: bytes over bandwidth, as the paper computes.
- ``closed``: a controller that looks ahead. Bursts take the bus their time, all-bank refresh takes its share of it, and rows
  cannot open faster than tRRD, tFAW and tRC allow. Within 3 % of a cycle simulator for runs of 32 to 1024 bytes.
- ``inorder``: a controller without look-ahead, which waits tRP + tRCD for every row it opens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgexpert.simulator.device import Dram

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def count_accesses(dram: Dram, starts: Counts, lengths: Counts, owner: Counts, owners: int) -> tuple[Counts, Counts]:
    """Bursts and row activations of reading runs of bytes.

    Args:
        starts, lengths: in bytes, [R]; the runs of one owner are neighbours in this list, ascending, and do not overlap.
        owner: whose run it is, [R], from 0 to ``owners``.

    Returns:
        Bursts and activations of each owner, all channels together, int64 [owners] each.
    """
    first, last = starts // dram.burst_bytes, (starts + lengths - 1) // dram.burst_bytes
    same = np.zeros(len(owner), bool)
    same[1:] = owner[1:] == owner[:-1]
    before = np.roll(last, 1)
    first = np.where(same & (before >= first), before + 1, first)  # a burst that the run before has fetched already
    bursts = np.bincount(owner, last - first + 1, owners).astype(np.int64)
    activations = np.zeros(owners, np.int64)
    a_page = dram.page_bytes // dram.burst_bytes
    for channel in range(dram.channels):
        begin = first + (channel - first) % dram.channels
        end = last - (last - channel) % dram.channels
        here = begin <= end
        whose = owner[here]
        begin_page, end_page = (edge[here] // dram.channels // a_page for edge in (begin, end))
        opened = end_page - begin_page + 1
        opened[1:] -= (whose[1:] == whose[:-1]) & (begin_page[1:] == end_page[:-1])  # the row is still open
        activations += np.bincount(whose, opened, owners).astype(np.int64)
    return bursts, activations


def count_mask_accesses(dram: Dram, mask: NDArray[np.bool_], row_bytes: float) -> tuple[Counts, Counts]:
    """Bursts and row activations of reading the marked rows of matrices, each row ``row_bytes`` long.

    Args:
        mask: bool [matrices, rows].

    Returns:
        As `count_accesses`, for each matrix.
    """
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    owner, begin = np.nonzero(edges == 1)
    end = np.nonzero(edges == -1)[1]
    starts = np.floor(begin * row_bytes).astype(np.int64)
    return count_accesses(dram, starts, np.ceil(end * row_bytes).astype(np.int64) - starts, owner, len(mask))


def seconds(dram: Dram, count: Floats, bursts: Floats, activations: Floats) -> Floats:
    """Time of transfers of ``count`` bytes each. Bursts and activations do not matter to the flat mode."""
    if dram.mode == "flat":
        return count / dram.bandwidth
    available = 1 - (dram.trfc + dram.trcd) / dram.trefi  # a refresh closes all rows; then one has to be opened again
    cycles = bursts * dram.burst_cycles
    if dram.mode == "inorder":
        cycles = cycles + activations * (dram.trp + dram.trcd)
    else:
        apart = max(dram.trrd, dram.tfaw / 4, dram.trc / dram.banks)  # cycles between two rows opening
        cycles = np.maximum(cycles, activations * apart)
    return cycles * dram.clock_ns * 1e-9 / dram.channels / available
