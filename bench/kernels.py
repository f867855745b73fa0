"""Times the kernels on this GPU: `python bench/kernels.py [--peers DIR] [--json FILE] [--rows TEXT]`.

The same as `seekforge bench kernels`.
"""

from seekforge.compile.bench_kernels import main

if __name__ == "__main__":
    raise SystemExit(main())
