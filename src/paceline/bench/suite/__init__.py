"""Suites of agent tasks about real code, built on the user's machine from pinned packages or a git repository."""

from paceline.bench.suite.choice import stratified
from paceline.bench.suite.git import build_from_git
from paceline.bench.suite.questions import load_questions
from paceline.bench.suite.suite import SUITES, load_suite, suite_sha256

__all__ = ["SUITES", "build_from_git", "load_questions", "load_suite", "stratified", "suite_sha256"]
