"""The benchmark: real training with every strategy on a lab cluster, in one interleaved run."""
