"""Whether zeropp is right on the cluster at hand, and whether it helps: a file for each part."""
