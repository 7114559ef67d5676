from .artifacts import Header as Header, load_artifact as load_artifact, read_header as read_header
from .forecasts import ForecastTable as ForecastTable, load_forecasts as load_forecasts, save_columns as save_columns
from .load_save import (
    from_rows as from_rows,
    load as load,
    load_logits as load_logits,
    load_table as load_table,
    save as save,
    save_logits as save_logits,
    stream as stream,
)
from .predictions import (
    Predictions as Predictions,
    PredictionTable as PredictionTable,
    from_multilabel as from_multilabel,
    open_predictions as open_predictions,
)
from .shards import BadShard as BadShard, Shards as Shards
