"""Chunks and batches: nothing lost, one order for a seed, and a position that can be saved anywhere."""

import subprocess
import sys


def test_reading_data_starts_no_backend() -> None:
    """What makes a backend deterministic is set later, before it starts; and a run may still ask for devices."""
    program = (
        "import jax\n"
        "from sdc.train.data import Corpus, batches, load_tokenizer, make_dataset\n"
        "dataset = make_dataset(Corpus(('to be or not to be',), 'example'), load_tokenizer(), 4, seed=0)\n"
        "next(batches(dataset, batch_size=1, microsteps=1))\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # an error once a backend has started\n"
        "assert jax.device_count() == 3\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
