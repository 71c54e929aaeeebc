"""Multiply matrices on every GPU to warm it up or to test it under load, and print its speed.

    python scripts/gpu_hot.py 60

The argument is the duration in seconds. With 0, the script runs until Ctrl-C. The exit status is 0,
or 1 if torch can use no GPU.
"""

import contextlib
import sys
import time

import torch

SIZE = 8192  # rows and columns of a matrix. One product takes 1.1e12 floating-point operations.
ROUND = 20  # products between two readings of the clock


def main(seconds: int) -> int:
    """Load every GPU for a time and return the exit status.

    Args:
        seconds: duration, or 0 for no limit.
    """
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if not devices:
        print(
            "error: torch can use no GPU. python check_setup.py shows the reason", file=sys.stderr
        )
        return 1
    has_bfloat16 = torch.cuda.get_device_capability(devices[0]) >= (8, 0)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    matrices = [
        torch.randn(SIZE, SIZE, device=device, dtype=dtype) / SIZE**0.5 for device in devices
    ]
    start = time.perf_counter()
    products = 0  # of each GPU
    with contextlib.suppress(KeyboardInterrupt):
        while not seconds or time.perf_counter() - start < seconds:
            # A product is queued on its GPU without waiting, so all GPUs work at the same time.
            for matrix in matrices * ROUND:
                matrix @ matrix
            for device in devices:
                torch.cuda.synchronize(device)
            products += ROUND
    elapsed = time.perf_counter() - start
    operations = 2 * SIZE**3 * products
    teraflops = operations / elapsed / 1e12
    for device in devices:
        print(f"{device} {torch.cuda.get_device_name(device)}  {teraflops:.1f} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
