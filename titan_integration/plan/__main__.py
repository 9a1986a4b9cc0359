"""Which GTP size? Plans a torchtitan job on a cluster, from one rank of it on the meta device.

    python -m titan_integration.plan TOML --cluster h200x8_infiniband               # ranks arrangements
    python -m titan_integration.plan TOML --cluster C.toml --only                   # the TOML's own arrangement
    python -m titan_integration.plan TOML --dry-run --world 3072                    # builds and checks one rank
    python -m titan_integration.plan --cluster C.toml --calibrate bench.json        # rates from measurements

Options of torchtitan (--training.seq_len=8192) change the TOML's. Clusters that are shipped go by their names. See
titan_integration/plan/__init__.py for how a plan is made, and what it leaves out.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: a plan is the same with a GPU and without

from titan_integration import cpu  # noqa: E402

cpu.install()

from titan_integration.plan.command import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main(__doc__))
