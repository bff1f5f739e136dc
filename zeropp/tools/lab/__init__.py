"""The lab: a cluster of network namespaces on one machine, for real training and measurements."""

from .cluster import Cluster, LabError, Link, LinkCounters
from .job import Job, JobError, JobResult
from .link_changes import Change, Schedule
from .processes import clean

__all__ = [
    "Change",
    "Cluster",
    "Job",
    "JobError",
    "JobResult",
    "LabError",
    "Link",
    "LinkCounters",
    "Schedule",
    "clean",
]
