"""A data source of your own: a diary in CSV files.

Run it:  adloco train examples/data_source.py --config.data.path='diaries/*.csv'
"""

import csv

from adloco_jax import DATA_SOURCES, DataSource
from adloco_jax.config import default_config


def diary_documents(file, data):
    """One document per row of a table of dates and texts."""
    with open(file, newline="", encoding="utf-8") as lines:
        for date, text in csv.reader(lines):
            yield f"{date}: {text}"


DATA_SOURCES["diary"] = DataSource(diary_documents)


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.data.source, config.data.path = "diary", "diaries/*.csv"
    return config
