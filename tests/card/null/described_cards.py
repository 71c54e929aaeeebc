"""The cards that the null card passes for: what PyTorch, Triton and Inductor ask of a card.

Multiprocessors, memory and cache as the makers' data sheets have them; memory is about what the driver leaves of it
(a T4 of 16 GB has 14.6 GiB). What a multiprocessor holds goes by compute capability (CUDA C++ Programming Guide,
technical specifications per compute capability).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Processor:
    """A multiprocessor: threads at once, KiB of shared memory, and how many of them a block may have."""

    threads: int
    shared_kib: int
    block_kib: int


PROCESSORS = {
    (7, 0): Processor(2048, 96, 96),
    (7, 5): Processor(1024, 64, 64),
    (8, 0): Processor(2048, 164, 163),
    (8, 6): Processor(1536, 100, 99),
    (8, 9): Processor(1536, 100, 99),
    (9, 0): Processor(2048, 228, 227),
    (10, 0): Processor(2048, 228, 227),
    (12, 0): Processor(1536, 100, 99),
}


@dataclass(frozen=True)
class Card:
    """A card by the driver's name of it."""

    driver_name: str
    capability: tuple[int, int]
    memory_gib: float
    processors: int
    l2_mib: int

    def described(self, memory_gib: float | None = None) -> str:
        """Return the card as the library reads it, with another memory if that is given."""
        (major, minor), inner = self.capability, PROCESSORS[self.capability]
        memory = int((memory_gib or self.memory_gib) * 2**30)
        shared = f"{inner.threads} {inner.shared_kib * 1024} {inner.block_kib * 1024}"
        return f"{major} {minor} {memory} {self.processors} {shared} {self.l2_mib * 2**20} {self.driver_name}"


CARDS = {
    "v100": Card("Tesla V100-SXM2-16GB", (7, 0), 15.8, 80, 6),
    "t4": Card("Tesla T4", (7, 5), 14.6, 40, 4),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 79.2, 108, 40),
    "a100_40gb": Card("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, 108, 40),
    "a100_pcie": Card("NVIDIA A100 80GB PCIe", (8, 0), 79.2, 108, 40),
    "a30": Card("NVIDIA A30", (8, 0), 23.6, 56, 24),
    "a10g": Card("NVIDIA A10G", (8, 6), 22.0, 80, 6),
    "a4000": Card("NVIDIA RTX A4000", (8, 6), 15.6, 48, 4),
    "a40": Card("NVIDIA A40", (8, 6), 44.4, 84, 6),
    "a4500": Card("NVIDIA RTX A4500", (8, 6), 19.7, 56, 6),
    "a5000": Card("NVIDIA RTX A5000", (8, 6), 23.6, 64, 6),
    "a6000": Card("NVIDIA RTX A6000", (8, 6), 47.5, 84, 6),
    "rtx3060": Card("NVIDIA GeForce RTX 3060", (8, 6), 11.6, 28, 3),
    "rtx3080": Card("NVIDIA GeForce RTX 3080", (8, 6), 9.6, 68, 5),
    "rtx3090": Card("NVIDIA GeForce RTX 3090", (8, 6), 23.6, 82, 6),
    "rtx3090ti": Card("NVIDIA GeForce RTX 3090 Ti", (8, 6), 23.6, 84, 6),
    "l4": Card("NVIDIA L4", (8, 9), 22.0, 58, 48),
    "l40": Card("NVIDIA L40", (8, 9), 44.4, 142, 96),
    "l40s": Card("NVIDIA L40S", (8, 9), 44.4, 142, 96),
    "rtx2000ada": Card("NVIDIA RTX 2000 Ada Generation", (8, 9), 15.6, 22, 12),
    "rtx4000ada": Card("NVIDIA RTX 4000 Ada Generation", (8, 9), 19.6, 48, 48),
    "rtx6000ada": Card("NVIDIA RTX 6000 Ada Generation", (8, 9), 47.4, 142, 96),
    "rtx4060": Card("NVIDIA GeForce RTX 4060", (8, 9), 7.6, 24, 24),
    "rtx4060ti": Card("NVIDIA GeForce RTX 4060 Ti", (8, 9), 15.6, 34, 32),
    "rtx4080": Card("NVIDIA GeForce RTX 4080", (8, 9), 15.6, 76, 64),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 23.5, 128, 72),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 132, 50),
    "h100_nvl": Card("NVIDIA H100 NVL", (9, 0), 93.1, 132, 50),
    "h100_pcie": Card("NVIDIA H100 PCIe", (9, 0), 79.1, 114, 50),
    "h200": Card("NVIDIA H200", (9, 0), 139.8, 132, 60),
    "b200": Card("NVIDIA B200", (10, 0), 178.3, 148, 126),
    "rtx5070ti": Card("NVIDIA GeForce RTX 5070 Ti", (12, 0), 15.5, 70, 48),
    "rtx5080": Card("NVIDIA GeForce RTX 5080", (12, 0), 15.5, 84, 64),
    "rtxpro6000": Card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 95.0, 188, 128),
    "rtx5090": Card("NVIDIA GeForce RTX 5090", (12, 0), 31.4, 170, 96),
    "unknown": Card("NVIDIA Some Card 9000", (8, 6), 20.0, 60, 6),
}
