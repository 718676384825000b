"""Pictures and captions become a checked list of examples; every picture is looked at before training starts. No torch here.

Read on in pictures.py, captions.py, folder.py, scan.py, report.py, buckets.py.
"""

from tiny_engram.training.data.buckets import bucket_of, bucket_sizes
from tiny_engram.training.data.captions import DEFAULT_TEMPLATES, SUBJECT_TEMPLATES, varied
from tiny_engram.training.data.pictures import DataError, Example, fitted_mask, fitted_picture, load_picture, open_picture
from tiny_engram.training.data.report import ScanReport, report
from tiny_engram.training.data.scan import Scan, scan_examples, scan_folder, scan_for

__all__ = [
    "DEFAULT_TEMPLATES",
    "SUBJECT_TEMPLATES",
    "DataError",
    "Example",
    "Scan",
    "ScanReport",
    "bucket_of",
    "bucket_sizes",
    "fitted_mask",
    "fitted_picture",
    "load_picture",
    "open_picture",
    "report",
    "scan_examples",
    "scan_folder",
    "scan_for",
    "varied",
]
