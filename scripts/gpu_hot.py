"""Multiply matrices on every card, to warm it up or to test it under load; print what each reached.

    python scripts/gpu_hot.py 60      # seconds; 0: until Ctrl-C

Exit status: 0 done, 1 no card that torch can use, 2 bad input.
"""

import contextlib
import sys
import time

import torch

SIZE, ROUND = 8192, 20  # 1.1 TFLOP a product; products between two readings of the clock


def main(argv: list[str] | None = None) -> int:
    """Load every card; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) > 1 or argv and not argv[0].isdecimal():
        print(f"error: {' '.join(argv)}: give seconds, a whole number; 0 is until Ctrl-C", file=sys.stderr)
        return 2
    seconds = int(argv[0]) if argv else 60
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if not devices:
        print("error: no card that torch can use; python check_setup.py says why", file=sys.stderr)
        return 1
    print(f"{len(devices)} card{'s' * (len(devices) > 1)}, {f'{seconds} s' if seconds else 'until Ctrl-C'}", flush=True)
    half = torch.bfloat16 if torch.cuda.get_device_capability(devices[0]) >= (8, 0) else torch.float16
    matrices = [torch.randn(SIZE, SIZE, device=device, dtype=half) / SIZE**0.5 for device in devices]
    start, products = time.perf_counter(), 0
    with contextlib.suppress(KeyboardInterrupt):
        while not seconds or time.perf_counter() - start < seconds:
            for _ in range(ROUND):
                for matrix in matrices:  # each card has a line of its own
                    matrix @ matrix
            for device in devices:
                torch.cuda.synchronize(device)
            products += ROUND
    rate = 2 * SIZE**3 * products / (time.perf_counter() - start) / 1e12
    for number, device in enumerate(devices):
        print(f"cuda:{number} {torch.cuda.get_device_name(device)}  {rate:.1f} TFLOP/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
