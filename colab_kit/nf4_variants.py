"""How nf4.cu may be compiled, and how its blocks of threads may share the work."""

from __future__ import annotations

import dataclasses
import math

BLOCK_K, GROUP = 64, 4
"""values of K that share a scale; of such blocks, how many the kernel takes at a time"""


def groups(k: int) -> int:
    """of blocks in k values, the last one perhaps not whole"""
    return -(-k // (GROUP * BLOCK_K))


@dataclasses.dataclass(frozen=True)
class Variant:
    """How nf4.cu is compiled; the names are its macros."""

    MT: int
    R: int
    WARPS: int
    RESIDENT: int = 1
    WGMMA: int = 0
    """0: mma; 1: wgmma, which only Hopper has; 2: and x as prepare_x has left it, which pays for large products"""
    ALIGNED: int = 0
    """1: the table's address is a multiple of 64 KiB: an addition less for each two values of W, more memory"""
    HALF: int = 0

    @property
    def prepared(self) -> bool:
        """x comes from prepare_x; only then can the work be a stream (`grid`)"""
        return self.WGMMA == 2

    @property
    def rows(self) -> int:
        """of W, a block of threads"""
        return self.WARPS * self.R * 16

    @property
    def shared(self) -> int:
        """bytes (nf4_device.cu has the order)"""
        table, stage, small = 256 * 256, 4 * self.MT * 8 * (128 if self.WGMMA else 256), self.rows * 40 + 16
        if self.ALIGNED:
            below = not self.WGMMA or 2 * stage + small <= table - 1024
            return 2 * table + (-1024 if below else stage)
        return (table + 2 * stage if self.WGMMA else max(table, 2 * stage)) + small

    @property
    def taken(self) -> int:
        """bytes of a multiprocessor's shared memory: the driver adds 1,024 to each block of threads"""
        return self.shared + 1024

    @property
    def sums(self) -> int:
        """bytes of shared memory that lora_shrink takes"""
        return self.WARPS * 16 * self.MT * 8 * 4 + 4

    @staticmethod
    def per(blocks: int, split: int) -> int:
        """blocks of 64 in a part of K, whole groups"""
        return math.ceil(math.ceil(blocks / min(split, 255)) / GROUP) * GROUP

    def tiles(self, rows: int, n: int) -> tuple[int, int]:
        """of x's rows (batches) and of W's"""
        return -(-rows // (self.MT * 8)), -(-n // self.rows)

    def grid(self, rows: int, n: int, k: int, split: int) -> tuple[int, int, int]:
        """Blocks of threads: batches, tiles, parts of K: `split`, or fewer where one would be left without work. Below
        0: a stream, -split blocks that share the groups of 64-blocks of all tiles alike."""
        blocks, tiles = -(-k // BLOCK_K), self.tiles(rows, n)
        if split < 0:
            assert self.prepared, "the others have no streams"
            return min(-split, math.prod(tiles) * groups(k)), 1, 1
        return *tiles, -(-blocks // self.per(blocks, split))

    def workspace(self, grid: tuple[int, int, int], split: int) -> int:
        """float32 values that the blocks of a split K leave for the last of them"""
        places = 2 * grid[0] if split < 0 else math.prod(grid) if grid[2] > 1 else 0
        return self.rows * self.MT * 8 * places


AMPERE = {
    1: (Variant(1, 2, 7), Variant(1, 2, 4, 2)),
    2: (Variant(2, 2, 8), Variant(2, 2, 4, 2)),
    4: (Variant(4, 2, 8), Variant(4, 2, 7), Variant(4, 1, 8)),
}
HOPPER = {
    1: (Variant(1, 2, 4, 2), Variant(1, 2, 7, ALIGNED=1), Variant(1, 2, 12), Variant(1, 2, 8, ALIGNED=1)),
    2: (Variant(2, 2, 8, ALIGNED=1), Variant(2, 1, 8, 2, WGMMA=2), Variant(2, 1, 16, WGMMA=1, ALIGNED=1)),
    4: (
        Variant(4, 1, 12, WGMMA=1, ALIGNED=1),
        Variant(4, 2, 8, WGMMA=2, ALIGNED=1),
        Variant(4, 2, 12, WGMMA=2, ALIGNED=1),
    ),
    8: (Variant(8, 1, 12, WGMMA=2, ALIGNED=1), Variant(8, 2, 8, WGMMA=2, ALIGNED=1)),
}
"""by tiles of 8 rows of x; the fastest that fits the card's shared memory is chosen by measuring (AMPERE: and newer)"""


def variants(rows: int, half: bool, capability: tuple[int, int]) -> list[Variant]:
    """That may be the fastest for so many rows of x."""
    some = HOPPER if capability == (9, 0) else AMPERE
    tiles = next((tiles for tiles in some if tiles * 8 >= rows), max(some))
    return [dataclasses.replace(variant, HALF=int(half)) for variant in some[tiles]]


def splits(variant: Variant, rows: int, n: int, k: int, processors: int) -> list[int]:
    """How often K may best be cut: the four with the least work for the multiprocessor that has most, and a stream
    (`Variant.grid`). A block of threads starts and ends in about the time that 12 / R of its 64-blocks take."""
    work, blocks, at_once = {}, -(-k // BLOCK_K), processors * variant.RESIDENT
    for split in range(1, blocks + 1):
        grid = variant.grid(rows, n, k, split)
        turns = math.ceil(math.prod(grid) / at_once)
        work.setdefault(grid[2], turns * (variant.per(blocks, split) + 12 / variant.R))
    enough = groups(k) < 256 and math.prod(variant.tiles(rows, n)) * groups(k) >= at_once
    streams = [-at_once] if variant.prepared and enough else []
    return streams + sorted(sorted(work, key=work.get)[:4])
