"""Times the kernels on this GPU, as `seekforge bench kernels` does.

python bench/kernels.py [--peers DIR] [--json FILE] [--rows TEXT]
"""

from seekforge.compile.bench_kernels import main

if __name__ == "__main__":
    raise SystemExit(main())
