from .grid import Cell as Cell, Options as Options, STUDIES as STUDIES, Study as Study, product as product
from .published import (
    ComparedNumber as ComparedNumber,
    PublishedValue as PublishedValue,
    compare_with_paper as compare_with_paper,
    published_values as published_values,
)
from .run import RunSummary as RunSummary, run as run
from .store import Outcome as Outcome, Store as Store
from .study_page import save_page as save_page
from .tables import Column as Column, Table as Table, save_tables as save_tables, tabulate as tabulate
