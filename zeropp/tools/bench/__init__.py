"""The benchmark: every strategy trained for real on a lab cluster, measured in one interleaved run."""
