"""Multiply matrices on every card, to warm it up or to test it under load; print what each reached.

    python scripts/gpu_hot.py 60      # seconds; 0: until Ctrl-C

Exit status: 0 done, 1 no card that torch can use.
"""

import contextlib
import sys
import time

import torch

SIZE, ROUND = 8192, 20  # 1.1 TFLOP a product; products between two readings of the clock


def main(seconds: int) -> int:
    """Load every card; return the exit status."""
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if not devices:
        print("error: no card that torch can use; python check_setup.py says why", file=sys.stderr)
        return 1
    half = (
        torch.bfloat16 if torch.cuda.get_device_capability(devices[0]) >= (8, 0) else torch.float16
    )
    matrices = [
        torch.randn(SIZE, SIZE, device=device, dtype=half) / SIZE**0.5 for device in devices
    ]
    start, products = time.perf_counter(), 0
    with contextlib.suppress(KeyboardInterrupt):
        while not seconds or time.perf_counter() - start < seconds:
            for matrix in matrices * ROUND:  # each card has a line of its own
                matrix @ matrix
            for device in devices:
                torch.cuda.synchronize(device)
            products += ROUND
    rate = 2 * SIZE**3 * products / (time.perf_counter() - start) / 1e12
    for device in devices:
        print(f"{device} {torch.cuda.get_device_name(device)}  {rate:.1f} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
