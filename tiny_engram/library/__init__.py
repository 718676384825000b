"""A library: thousands of concepts in one mapped file. Imports numpy, concept, concept_file, files and errors; knows no pipeline."""

from .entry import LibraryEntry, LibraryError
from .library import ConceptLibrary
from .state import is_library

__all__ = ["ConceptLibrary", "LibraryEntry", "LibraryError", "is_library"]
