"""The report: one self-contained HTML page and a Markdown table, from a summary and the turns it was made of."""

from paceline.bench.report.write import write_report

__all__ = ["write_report"]
