#!/usr/bin/env python
"""Bandwidth of the kernel that sums the ranks' parts of a gradient (transport "symmetric"), beside that of a copy, one GPU:

    python scripts/bench_sum.py

Medians of launches, each over memory that no cache has, on random numbers. "GB/s" counts all that is read and written;
the copy is torch's, of as many bytes.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from gtp_dtensor.transport.fabric import Sum
from gtp_dtensor.transport.summing import new_kernel, sum_in_one_kernel

NUM_COPIES = 4  # of everything, taken in turns


def median_seconds(launch, num: int) -> float:
    """Of ``launch(i)``, on the device."""
    times = []
    for index in range(num + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(index % NUM_COPIES)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[5:])


def measure(
    num: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype, adds: bool, steps: int
) -> tuple[float, float]:
    """(GB/s of the sum, of a copy) of ``num`` elements over ``size`` ranks."""
    device = torch.device("cuda")
    own, inbox = (
        [torch.randn(count, device=device).to(dtype) for _ in range(NUM_COPIES)] for count in (num, num * (size - 1))
    )
    outs = [torch.randn(num, device=device).to(out_dtype) for _ in range(NUM_COPIES)]
    jobs = [
        Sum(one, 0, num, num, parts, num, out, 0, num, size, size // 2, 0.5, adds)
        for one, parts, out in zip(own, inbox, outs)
    ]
    num_bytes = num * (size * dtype.itemsize + (1 + adds) * out_dtype.itemsize)
    sources = [torch.randn(num_bytes // 8, device=device) for _ in range(NUM_COPIES)]
    goals = [torch.empty_like(source) for source in sources]
    kernel, stream = new_kernel(), torch.cuda.current_stream().cuda_stream
    sum_s = median_seconds(lambda index: sum_in_one_kernel(jobs[index], kernel, stream), steps)
    copy_s = median_seconds(lambda index: goals[index].copy_(sources[index]), steps)
    return num_bytes / sum_s / 1e9, 2 * sources[0].nbytes / copy_s / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=14_680_064, help="of a rank's rows (default: of 58.7 M over 4)")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_sum.py: needs a GPU; torch finds none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.elements:,} elements")
    print(f"{'ranks':>5} {'parts':>9} {'gradient':>9} {'adds':>5} {'GB/s':>8} {'copy':>8} {'of it':>6}")
    for size in (2, 4, 8):
        for dtype, out_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
            for adds in (False, True):
                found, copied = measure(args.elements, size, dtype, out_dtype, adds, args.steps)
                names = (str(one).removeprefix("torch.") for one in (dtype, out_dtype))
                print("{:>5} {:>9} {:>9} {!s:>5} {:>8.0f} {:>8.0f} {:>6.2f}".format(
                    size, *names, adds, found, copied, found / copied
                ), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
