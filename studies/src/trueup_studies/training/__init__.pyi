from .augment import flip_and_crop as flip_and_crop
from .calibratability import (
    CalibratabilityRow as CalibratabilityRow,
    LossSetting as LossSetting,
    SizeRow as SizeRow,
    list_settings as list_settings,
    measure_calibratability as measure_calibratability,
    validation_sizes as validation_sizes,
)
from .data import DATASETS as DATASETS, Data as Data, load_data as load_data
from .history import Epoch as Epoch, History as History
from .loop import TrainingError as TrainingError, TrainingResult as TrainingResult, train as train
from .tasks import Classification as Classification, Forecasts as Forecasts, Regression as Regression
